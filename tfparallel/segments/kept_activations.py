"""How many bytes of activations a step keeps from its forward pass for its backward pass.

Counted in a graph that is traced and not run: tensors of the forward pass that operations of the
backward pass take. What is made of weights and constants alone does not count, what is on the host
meanwhile neither, and what shares its memory with another tensor (a reshape) counts once.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from tfparallel.internals import FuncGraph
from tfparallel.internals.keras_layers import kept_losses
from tfparallel.replicas.remat_scopes import without_remat_of_keras
from tfparallel.segments.host_copies import ASKS_SHAPE, SHARES_MEMORY
from tfparallel.segments.segment import made_of


def kept_bytes(
    model: keras.Model,
    specs: object,
    sources: Sequence[object],
    with_weights: Callable[[], AbstractContextManager[Sequence[tf.Tensor]]],
    in_step: Callable[[], AbstractContextManager],
    device: str | None = None,
) -> int | None:
    """Bytes that a training step of one replica keeps; the loss's own are not in it.

    Args:
        model: built.
        specs: of what it is called with, a nest of anything with shape and dtype.
        sources: what gradients are asked of.
        with_weights: within it, weights read as the tensors that it gives.
        in_step: around forward and backward pass.
        device: of the replica.

    Returns:
        None where a size is not known before the step runs: of a loop's tensors, say.
    """
    with FuncGraph("kept_activations").as_default() as graph, keras.StatelessScope():
        given = keras.tree.map_structure(_placeholder, specs)
        # The tape is there first: weights that are given, in parts, are told to it.
        with (
            tf.device(device),
            tf.GradientTape() as tape,
            with_weights() as weights,
            kept_losses(model),
            without_remat_of_keras(model),
            in_step(),
        ):
            outputs = [y for y in _tensors(model(given, training=True)) if y.dtype.is_floating]
            begin = len(graph.get_operations())
            tape.gradient(outputs, sources)
    operations = graph.get_operations()
    read = [y for op in operations if op.type == "ReadVariableOp" for y in op.outputs]
    without = made_of([*weights, *read]) | {x.op for x in (*weights, *read, *_tensors(given))}
    return _bytes_of(_kept(operations[:begin], operations[begin:], without))


def _placeholder(spec: keras.KerasTensor) -> tf.Tensor:
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


def _tensors(nest: object) -> list[tf.Tensor]:
    return [x for x in keras.tree.flatten(nest) if isinstance(x, tf.Tensor)]


def _kept(
    forward: Sequence[tf.Operation],
    backward: Sequence[tf.Operation],
    without: Collection[tf.Operation],
) -> list[tf.Tensor]:
    made = set(forward)
    takers = [op for op in backward if op.type not in ASKS_SHAPE]
    taken = [x for op in takers for x in op.inputs if op.device == x.device]
    owned = [_owner(x) for x in taken if x.op in made]
    kept = {id(x): x for x in owned if x.op in made and x.op not in without}
    return [x for x in kept.values() if x.op.type != "Const" and x.dtype != tf.resource]


def _owner(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory `tensor` is."""
    while tensor.op.type in SHARES_MEMORY:
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes_of(tensors: Sequence[tf.Tensor]) -> int | None:
    sizes = [x.shape.num_elements() for x in tensors]
    if None in sizes or any(x.dtype == tf.variant for x in tensors):
        return None
    return sum(size * x.dtype.size for size, x in zip(sizes, tensors, strict=True))
