"""How long each part of a model takes, forward and backward."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_ROWS = 8  # enough to outweigh the cost of a call
_REPEATS = 3


def profile_parts(graph: Any, parts: Sequence[Any]) -> list[float]:
    """Seconds of each part, forward and backward, on a small batch of zeros.

    Times depend on shapes, not on values. Nothing of the model changes: it runs as in inference.

    Args:
        graph: the functional model; None for a subclassed one, whose parts cannot be run one by
            one, so that their numbers of weights stand for their times.
        parts: `Part`s, in the order in which they run.
    """
    if graph is None:
        return [1.0 + sum(_num_elements(w) for w in part.operation.weights) for part in parts]
    with tf.init_scope():
        tensors = {id(x): _zeros(x) for x in graph.inputs}
        return [_profile_node(graph, part.node, tensors) for part in parts]


def _profile_node(graph: Any, node: Any, tensors: dict[int, Any]) -> float:
    args, kwargs = node.arguments.fill_in(tensors)
    operation = graph._get_operation_for_node(node)
    inputs = [x for x in tf.nest.flatten((args, kwargs)) if _is_differentiable(x)]
    weights = [w.value for w in getattr(operation, "trainable_weights", ())]
    times_s = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = tf.nest.flatten(operation(*args, **kwargs))
        tape.gradient([y for y in outputs if _is_differentiable(y)], [*inputs, *weights])
        times_s.append(time.perf_counter() - started)
    tensors.update({id(x): y for x, y in zip(node.outputs, outputs, strict=True)})
    return statistics.median(times_s[1:])


def _zeros(tensor: Any) -> tf.Tensor:
    shape = [_ROWS, *(1 if size is None else size for size in tensor.shape[1:])]
    return tf.zeros(shape, tensor.dtype)


def _is_differentiable(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating


def _num_elements(weight: Any) -> int:
    return int(tf.TensorShape(weight.shape).num_elements() or 0)
