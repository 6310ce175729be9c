"""What is computed from sizes in a function, in the host's memory wherever the function runs.

TensorFlow has sizes in the host's memory, and what it calls on a GPU computes there: some
operations of int32 on the GPU itself, whose result then goes back to the host in the midst of a
pass. No device is written into a function that any stage's device may call, so that they cannot be
put on the host as in `sizes_on_hosts.py`. The same numbers are taken one by one instead: for that,
and for what multiplies them, GPUs have operations that read and write the host's memory.

    gradient of a mean   DynamicStitch([0, 1], [0]; shape, [1])  ->  Pack(1, shape[1])
    product of matrices  Prod(GatherV2(shape, [0, 1]))           ->  shape[0] * shape[1]
"""

import functools
import operator
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from tfparallel.internals.graphs import take_instead
from tfparallel.replicas.sizes_on_hosts import SIZES, is_made_of


def keep_sizes_in_host_memory(operations: Iterable[tf.Operation]) -> None:
    """Has operations of a function take what is computed from sizes from the host's memory.

    What is known before the function runs stays as it is: TensorFlow computes it then.

    Args:
        operations: each behind those that it depends on.
    """
    made: set[tf.Operation] = set()  # of sizes, and constants
    unknown: set[tf.Operation] = set()  # among them, before the function runs
    for operation in operations:
        is_size = operation.type in SIZES
        if not is_size and not is_made_of(made, operation):
            continue
        made.add(operation)
        given = operation.inputs
        if any(not x.shape.is_fully_defined() if is_size else x.op in unknown for x in given):
            new = _replaced(operation) if operation.type in _ONE_BY_ONE else set()
            made |= new
            unknown |= {operation, *new}


def _replaced(operation: tf.Operation) -> set[tf.Operation]:
    """Has what takes the result of `operation` take the same of others, which are returned."""
    graph, (result,) = operation.graph, operation.outputs
    count, takers = len(graph.get_operations()), result.consumers()
    if result.dtype != tf.int32 or not takers:
        return set()
    with graph.as_default(), tf.device(operation.device), tf.control_dependencies(None):
        instead = _ONE_BY_ONE[operation.type](operation)
    for taker in takers if instead is not None else ():
        for index, tensor in enumerate(taker.inputs):
            if tensor is result:
                take_instead(taker, index, instead)
    return set(graph.get_operations()[count:])


def _stitched(operation: tf.Operation) -> tf.Tensor | None:
    count = operation.get_attr("N")
    values, data = [_value(x) for x in operation.inputs[:count]], operation.inputs[count:]
    indices = [x for x in values if x is not None]
    if len(indices) < count or not all(map(_is_list, data)):
        return None
    merged: dict[int, tf.Tensor] = {}
    for positions, numbers in zip(indices, data, strict=True):
        merged.update(zip(np.ravel(positions).tolist(), _elements(numbers), strict=True))
    if not merged:
        return tf.zeros([0], operation.outputs[0].dtype)
    return tf.stack([merged.get(i, 0) for i in range(max(merged) + 1)])  # others may be anything


def _gathered(operation: tf.Operation) -> tf.Tensor | None:
    sizes, indices = operation.inputs[0], _value(operation.inputs[1])
    if indices is None or np.ndim(indices) != 1 or not np.size(indices) or not _is_list(sizes):
        return None
    elements = _elements(sizes)
    return tf.stack([elements[i] for i in indices])


def _multiplied(operation: tf.Operation) -> tf.Tensor | None:
    sizes, (result,) = operation.inputs[0], operation.outputs
    if result.shape.rank != 0 or not _is_list(sizes):
        return None
    elements = _elements(sizes)
    return functools.reduce(operator.mul, elements) if elements else tf.ones([], sizes.dtype)


_ONE_BY_ONE: dict[str, Callable[[tf.Operation], tf.Tensor | None]] = {
    "DynamicStitch": _stitched,
    "GatherV2": _gathered,
    "Prod": _multiplied,
}


def _is_list(tensor: tf.Tensor) -> bool:
    """Whether it is one number, or a vector of a known length."""
    return tensor.shape.is_fully_defined() and tensor.shape.rank <= 1


def _elements(tensor: tf.Tensor) -> list[tf.Tensor]:
    return tf.unstack(tensor) if tensor.shape.rank else [tensor]


def _value(tensor: tf.Tensor) -> np.ndarray | None:
    """What integers are known to be; None of others. TensorFlow knows no sums, as of axes."""
    value, operation = tf.get_static_value(tensor), tensor.op
    if value is None and operation.type in _ARITHMETIC:
        given = [_value(x) for x in operation.inputs]
        value = None if any(x is None for x in given) else _ARITHMETIC[operation.type](*given)
    return value


_ARITHMETIC: dict[str, Callable] = {"AddV2": np.add, "FloorMod": np.mod}
