"""Numbers of each turn of a loop that its gradient needs, kept in the host's memory.

TensorFlow keeps in lists what the gradient of a loop needs of each turn: shapes, indices and
lengths, too, which a list on a GPU has in the GPU's memory. There each turn of the gradient sends
them to the host. Here they are in lists as shapes of tensors (`numbers_in_shapes.py`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

# How a graph knows a tensor.
from tensorflow.python.framework import ops

# Who says that XLA compiles; who differentiates loops, and decides what they keep.
from tensorflow.python.ops import control_flow_util, while_v2

from tfparallel.internals import keras_integers
from tfparallel.internals.graphs import FuncGraph
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.numbers_in_shapes import from_shape, in_shape, is_of_host


@contextlib.contextmanager
def loops_keep_numbers_on_hosts(devices: Sequence[str]) -> Iterator[None]:
    """Within it, gradients of loops take no numbers from a GPU, if one of `devices` is one.

    XLA has no shapes that change from turn to turn: what it compiles is as ever.
    """
    if not keras_integers.has_gpu(devices):
        yield
        return
    hook = wrapped(while_v2, "_grad_fn", _gradient)
    with shadowed(
        while_v2, "_grad_fn", hook, during="a step", why="GPUs would send what it keeps."
    ):
        yield


def _gradient(original: Callable, ys: object, xs: object, args: object, body: FuncGraph) -> object:
    """Traces a turn of the gradient of a loop with this `body`."""
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        return original(ys, xs, args, body)
    graph._capture_helper = functools.partial(_capture, graph, body, graph._capture_helper)
    try:
        return original(ys, xs, args, body)
    finally:
        del graph._capture_helper


def _capture(
    graph: FuncGraph, body: FuncGraph, original: Callable, tensor: tf.Tensor, name: str | None
) -> tf.Tensor:
    """What a turn of the gradient has for `tensor`, of a turn of the loop or of around it."""
    while tensor.graph is body and tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    known = graph._indirect_captures
    is_new = tensor.graph is body and ops.tensor_id(tensor) not in known and is_of_host(tensor)
    if not is_new or while_v2._is_loop_invariant(tensor, body.inputs, body.outputs):
        return original(tensor, name)
    with body.as_default():
        carrier = in_shape(tensor)
    kept = original(carrier, name)
    known[ops.tensor_id(tensor)] = numbers = from_shape(kept, tensor.shape)
    return numbers
