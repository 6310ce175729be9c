"""Numbers of rows, and what is computed from them, in the host's memory.

TensorFlow has the shape of a tensor of any size there, and computes some of what comes of it on the
GPU, only to need it on the host again, which then waits for the GPU in the midst of a step: the
gradient of a mean does so (`DynamicStitch`), a reshape to as many rows as there are (`Prod`).
"""

import contextlib
from collections.abc import Container, Iterator, Sequence

import tensorflow as tf

from tfparallel.internals import keras_integers
from tfparallel.internals.graphs import is_stateful, place
from tfparallel.replicas.device_names import hosts_of

SIZES = {"Shape", "ShapeN", "Size"}
_ON_GPUS = {"DynamicStitch", "GatherV2", "Prod"}  # of int32, where they are not told otherwise


@contextlib.contextmanager
def sizes_on_hosts(devices: Sequence[str]) -> Iterator[None]:
    """What is traced within it computes sizes on the host, if one of `devices` is a GPU."""
    yield
    if tf.executing_eagerly() or not keras_integers.has_gpu(devices):
        return
    known: set[tf.Operation] = set()  # sizes, and constants
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation.type in SIZES or is_made_of(known, operation):
            known.add(operation)
            device = operation.device
            if operation.type in _ON_GPUS and device and keras_integers.has_gpu([device]):
                place(operation, hosts_of([device])[0])


def is_made_of(known: Container[tf.Operation], operation: tf.Operation) -> bool:
    """Whether it makes nothing but integers, and takes nothing but results of `known`."""
    if operation.type == "Placeholder" or is_stateful(operation):
        return False
    is_integer = all(y.dtype.is_integer for y in operation.outputs)
    return is_integer and all(x.op in known for x in operation.inputs)
