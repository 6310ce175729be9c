"""An update by an elementwise optimizer, of which each replica computes its shards.

What an optimizer asks of whole tensors is answered from all shards, before the update begins:
norms that clip, and whether all gradients are finite. Inside of it there may be branches
(accumulation, loss scaling) in which replicas cannot meet.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import BaseOptimizer
from tfparallel.internals.keras_layers import accumulated_gradient, moving_averages
from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.replicas.clipping import (
    clipped_by_norm,
    clips_by_norm,
    scaled_gradient,
    sum_of_squares,
    widest,
)
from tfparallel.sharded.shard_view import GlobalNumbers, current_numbers
from tfparallel.sharded.sharded_variables import ShardedVariable


class ReducedGradients:
    """Gradients of all rows, as the replica of shard `index` has them, beside their variables.

    Args:
        gradients: dense ones of sharded variables are shards already, sparse ones are whole.
        variables: Keras's, in the same order.
        index: of the replica's shards.

    Attributes:
        parts: the gradients, of sharded variables the replica's parts.
        values: the variables in TensorFlow.
    """

    def __init__(self, gradients: Sequence, variables: Sequence, index: int):
        self.gradients, self.variables = list(gradients), list(variables)
        self.values = [getattr(variable, "value", variable) for variable in self.variables]
        self.parts = [
            value.shards.part_of_rows(gradient, index)
            if self._is_cut(gradient, value)
            else gradient
            for gradient, value in zip(self.gradients, self.values, strict=True)
        ]

    @staticmethod
    def _is_cut(gradient: object, value: object) -> bool:
        return isinstance(value, ShardedVariable) and isinstance(gradient, tf.IndexedSlices)

    def present(self) -> list[int]:
        """Positions of the gradients that optimizers clip."""
        pairs = zip(self.gradients, self.variables, strict=True)
        return [k for k, (gradient, variable) in enumerate(pairs) if is_clipped(gradient, variable)]


def is_clipped(gradient: object, variable: object) -> bool:
    """Whether an optimizer that clips does so with a gradient of `variable`."""
    return gradient is not None and not getattr(variable, "overwrite_with_gradient", False)


def global_numbers(
    optimizer: BaseOptimizer, reduced: ReducedGradients, sum_of: Callable[[tf.Tensor], tf.Tensor]
) -> GlobalNumbers:
    """What the update of `reduced` has to know of other shards.

    Args:
        sum_of: adds up a tensor of every replica.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    squares = _squares(inner, optimizer, reduced) if clips_by_norm(inner) else {}
    is_asked = inner is not optimizer  # a LossScaleOptimizer skips steps that overflow
    flat = [_count_not_finite(reduced)] if is_asked else []
    of_parts = [k for k, (_, is_part) in squares.items() if is_part]
    dtype = widest(square for square, _ in squares.values())
    flat += [squares[k][0] for k in of_parts]
    if not flat:
        return GlobalNumbers(None if not squares else _in_order(reduced, squares), None)
    sums = tf.unstack(sum_of(tf.stack([tf.cast(number, dtype) for number in flat])))
    is_finite = tf.equal(sums.pop(0), 0) if is_asked else None
    squares.update({k: (total, True) for k, total in zip(of_parts, sums, strict=True)})
    return GlobalNumbers(_in_order(reduced, squares) if squares else None, is_finite)


def _in_order(reduced: ReducedGradients, squares: Mapping[int, tuple]) -> list[tf.Tensor | None]:
    return [squares[k][0] if k in squares else None for k in reduced.present()]


def _count_not_finite(reduced: ReducedGradients) -> tf.Tensor:
    parts = [_numbers(part) for part in reduced.parts if part is not None]
    return tf.add_n(
        [tf.cast(tf.reduce_any(~tf.math.is_finite(part)), tf.float32) for part in parts]
    )


def _numbers(gradient: Gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _squares(
    inner: BaseOptimizer, outer: BaseOptimizer, reduced: ReducedGradients
) -> dict[int, tuple[tf.Tensor, bool]]:
    """The sum of squares of what is clipped, by position, and whether it is of a part only.

    One device clips a sparse gradient by the norm of its rows as they are, equal ones apart. What
    is accumulated is dense.
    """
    scale = scale_before_clipping(inner, outer)
    found = {}
    for k in reduced.present():
        if not isinstance(reduced.values[k], ShardedVariable):
            continue
        is_whole = isinstance(reduced.gradients[k], tf.IndexedSlices)
        if inner.gradient_accumulation_steps:
            clipped, is_whole = _accumulated(inner, reduced, k, scale), False
        else:
            clipped = _numbers(reduced.gradients[k])
            clipped = clipped / tf.cast(scale, clipped.dtype)
        found[k] = sum_of_squares(clipped), not is_whole
    return found


def scale_before_clipping(inner: BaseOptimizer, outer: BaseOptimizer) -> tf.Tensor:
    """What gradients are divided by before they are clipped."""
    dynamic = outer.dynamic_scale if outer is not inner else 1.0
    return tf.convert_to_tensor(dynamic, tf.float32) * (inner.loss_scale_factor or 1.0)


def _accumulated(
    inner: BaseOptimizer, reduced: ReducedGradients, k: int, scale: tf.Tensor
) -> tf.Tensor:
    """What an update uses at the end of an accumulation, of the replica's part."""
    gradient = tf.convert_to_tensor(reduced.parts[k])
    accumulator = accumulated_gradient(inner, reduced.variables[k])
    before = accumulator.value.component_of_caller().read_value()
    return (gradient / tf.cast(scale, gradient.dtype) + before) / inner.gradient_accumulation_steps


# ---- methods of optimizers, which ask for these numbers ------------------------------------------


def hooks_of(optimizer: BaseOptimizer) -> dict[str, Callable]:
    """Methods of `optimizer` that act otherwise in a sharded update, and as ever outside of it."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return {"check_finite": _check_finite}
    return {
        "_clip_gradients": lambda original, gradients: _clip(optimizer, original, gradients),
        "_update_model_variables_moving_average": (
            lambda original, variables: _average(optimizer, original, variables)
        ),
    }


def _check_finite(check_finite: Callable, gradients: Sequence) -> tf.Tensor:
    numbers = current_numbers()
    if numbers is None or numbers.is_finite is None:
        return check_finite(gradients)
    return numbers.is_finite


def _clip(optimizer: BaseOptimizer, clip_gradients: Callable, gradients: Sequence) -> list:
    numbers = current_numbers()
    if numbers is None or numbers.squares is None:
        return clip_gradients(gradients)
    squares = [
        sum_of_squares(gradient) if square is None else square
        for gradient, square in zip(gradients, numbers.squares, strict=True)
    ]
    return clipped_by_norm(optimizer, gradients, squares, scaled_gradient)


def _where_kept(slot: object) -> contextlib.AbstractContextManager:
    """Where the calling replica keeps its part of a slot: the host, it may be."""
    if not isinstance(slot, ShardedVariable):
        return contextlib.nullcontext()
    return tf.device(slot.component_of_caller().device)


def _average(optimizer: BaseOptimizer, update_average: Callable, variables: Sequence) -> object:
    """As Keras's, past `KerasVariable.assign`, which expects the whole shape."""
    if current_numbers() is None or not optimizer.use_ema:
        return update_average(variables)
    for variable, average in zip(variables, moving_averages(optimizer), strict=True):
        if average is None:
            continue
        value, mean = tf.convert_to_tensor(variable.value), tf.convert_to_tensor(average.value)
        momentum = tf.cast(optimizer.iterations != 0, value.dtype) * optimizer.ema_momentum
        with _where_kept(average.value):
            average.value.assign(momentum * mean + (1 - momentum) * value)
    return None
