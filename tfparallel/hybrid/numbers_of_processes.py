"""What an update of a process's pieces has to know of those of others: norms, and overflows.

It is known before the update begins: in the branches of one (accumulation, loss scaling) processes
cannot meet.
"""

from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import BaseOptimizer
from tfparallel.internals.keras_layers import accumulated_gradient
from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.replicas.clipping import clips_by_norm, widest
from tfparallel.sharded.shard_view import GlobalNumbers, current_numbers
from tfparallel.sharded.update import is_clipped, scale_before_clipping
from tfparallel.tensor_parallel.clipping_parts import squares_in_parts
from tfparallel.tensor_parallel.gradient_in_parts import GradientInParts


def numbers_of_all(
    optimizer: BaseOptimizer,
    gradients: Sequence[Gradient | GradientInParts | None],
    variables: Sequence[keras.Variable],
    sum_of: Callable[[tf.Tensor], tf.Tensor],
) -> GlobalNumbers:
    """What `optimizer` asks of all pieces.

    Args:
        gradients: of all rows; of weights in pieces they are `GradientInParts`, dense ones of this
            process's pieces, sparse ones of all rows. Others are whole.
        variables: in the same order.
        sum_of: adds up a tensor of every process.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    is_asked = inner is not optimizer  # a LossScaleOptimizer skips steps that overflow
    flat = [_count_not_finite(gradients)] if is_asked else []
    squares: list | None = None
    if clips_by_norm(inner):
        scale = scale_before_clipping(inner, optimizer)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if is_clipped(g, v)]
        squares = [_squares(inner, scale, gradient, variable) for gradient, variable in pairs]
        flat += [each for each in squares if each is not None]
    if not flat:
        return GlobalNumbers(squares, None)
    dtype = widest(flat)
    sums = iter(tf.unstack(sum_of(tf.stack([tf.cast(number, dtype) for number in flat]))))
    is_finite = tf.equal(next(sums), 0) if is_asked else None
    if squares is not None:
        squares = [None if each is None else next(sums) for each in squares]
    return GlobalNumbers(squares, is_finite)


def _count_not_finite(gradients: Sequence[Gradient | GradientInParts | None]) -> tf.Tensor:
    counts = []
    for numbers in [x for g in gradients if g is not None for x in _numbers(g)]:
        with tf.device(numbers.device):
            is_finite = tf.reduce_all(tf.math.is_finite(numbers))
            counts.append(1 - tf.cast(is_finite, tf.float32))
    return tf.add_n(counts)


def _numbers(gradient: Gradient | GradientInParts) -> list[tf.Tensor]:
    if isinstance(gradient, GradientInParts):
        return gradient.numbers()
    return [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient]


def _squares(
    inner: BaseOptimizer, scale: tf.Tensor, gradient: object, variable: keras.Variable
) -> tf.Tensor | None:
    """Of this process's pieces, as they are clipped; None where each process knows the sum."""
    if not isinstance(gradient, GradientInParts):
        return None
    if inner.gradient_accumulation_steps:
        total = _unscaled(gradient, scale) + accumulated_gradient(inner, variable)
        return squares_in_parts(total / inner.gradient_accumulation_steps)
    return None if gradient.slices is not None else squares_in_parts(_unscaled(gradient, scale))


def _unscaled(gradient: GradientInParts, scale: tf.Tensor) -> GradientInParts:
    return gradient.mapped(lambda numbers: numbers / tf.cast(scale, numbers.dtype))


def known_finite(hooks: Mapping[str, Callable]) -> Mapping[str, Callable]:
    """`hooks` of an optimizer, of which the one that looks for overflows knows of all processes."""
    if "check_finite" not in hooks:
        return hooks
    otherwise = hooks["check_finite"]

    def check_finite(original: Callable, gradients: Sequence) -> tf.Tensor:
        numbers = current_numbers()
        if numbers is None or numbers.is_finite is None:
            return otherwise(original, gradients)
        return numbers.is_finite

    return {**hooks, "check_finite": check_finite}


def averaging_wholes(hooks: Mapping[str, Callable]) -> Mapping[str, Callable]:
    """`hooks` of an optimizer, which averages as Keras does where it updates whole weights."""
    name = "_update_model_variables_moving_average"
    if name not in hooks:
        return hooks
    otherwise = hooks[name]

    def average(original: Callable, variables: Sequence) -> object:
        return original(variables) if current_numbers() is None else otherwise(original, variables)

    return {**hooks, name: average}
