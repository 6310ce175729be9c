"""What an optimizer does beside its update, for variables in parts: each part where it is.

Keras would make wholes of accumulators (to clear them), of moving averages, and of gradients (to
ask whether they are finite, and to divide them by a loss scale).
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import BaseOptimizer
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import all_accumulated_gradients, moving_averages
from tfparallel.tensor_parallel.clipping_parts import clip
from tfparallel.tensor_parallel.gradient_in_parts import GradientInParts
from tfparallel.tensor_parallel.numbers_of_update import update_on
from tfparallel.tensor_parallel.ranks import ranks_of_caller
from tfparallel.tensor_parallel.split_variable import in_part, split_of


def optimizer_hooks(optimizer: BaseOptimizer) -> Mapping[str, Callable]:
    """Methods of `optimizer` that act otherwise on variables in parts: `hook(original, *args)`."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return {
            "check_finite": _check_finite,
            "_stateful_handle_finite_grads": functools.partial(_unscale, optimizer),
        }
    return {
        "_clip_gradients": functools.partial(clip, optimizer),
        "_backend_reset_gradient_accumulators": functools.partial(_reset, optimizer),
        "_update_model_variables_moving_average": functools.partial(_average, optimizer),
    }


def _check_finite(original: Callable, gradients: Sequence) -> tf.Tensor:
    in_parts = [g for g in gradients if isinstance(g, GradientInParts)]
    if not in_parts:
        return original(gradients)
    finite = []
    for numbers in [each for gradient in in_parts for each in gradient.numbers()]:
        with tf.device(numbers.device):
            finite.append(tf.reduce_all(tf.math.is_finite(numbers)))
    ranks = ranks_of_caller()
    if ranks is not None:
        is_wrong = tf.cast(tf.logical_not(tf.reduce_all(tf.stack(finite))), tf.float32)
        finite = [ranks.all_reduce(is_wrong) == 0]
    others = [g for g in gradients if g is not None and not isinstance(g, GradientInParts)]
    return tf.reduce_all(tf.stack([*finite, *([original(others)] if others else [])]))


def _unscale(
    optimizer: BaseOptimizer,
    original: Callable,
    gradients: Sequence,
    trainable_variables: Sequence[keras.Variable],
) -> object:
    """Has the inner optimizer get gradients in parts; Keras's division makes wholes of them."""
    if not any(isinstance(g, GradientInParts) for g in gradients):
        return original(gradients, trainable_variables)
    inner, scale = optimizer.inner_optimizer, tf.convert_to_tensor(optimizer.dynamic_scale)

    def apply(
        inner_apply: Callable,
        others: Sequence,
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> object:
        both = zip(gradients, others, strict=True)
        unscaled = [
            gradient.mapped(lambda numbers: keras.ops.divide(numbers, scale))
            if isinstance(gradient, GradientInParts)
            else other
            for gradient, other in both
        ]
        return inner_apply(unscaled, trainable_variables)

    with shadowed(
        inner,
        "apply",
        wrapped(inner, "apply", apply),
        during="an update",
        why="Parts are divided where they are.",
    ):
        rest = [None if isinstance(g, GradientInParts) else g for g in gradients]
        return original(rest, trainable_variables)


def _reset(optimizer: BaseOptimizer, original: Callable) -> None:
    accumulated = all_accumulated_gradients(optimizer)
    if not any(split_of(each) is not None for each in accumulated if each is not None):
        original()
        return
    for each in accumulated:
        split = None if each is None else split_of(each)
        if split is None and each is not None:
            each.assign(keras.ops.zeros(each.shape, dtype=each.dtype))
        for parts in [] if split is None else split.assigned_copies():
            for part in parts:
                with tf.device(part.device):
                    part.assign(tf.zeros(part.shape, part.dtype))


def _average(optimizer: BaseOptimizer, original: Callable, variables: Sequence) -> None:
    averages = moving_averages(optimizer) if optimizer.use_ema else []
    if not any(split_of(each) is not None for each in averages if each is not None):
        original(variables)
        return
    for variable, average in zip(variables, averages, strict=True):
        split = None if average is None else split_of(average)
        if split is None:
            _assign_average(optimizer, variable, average)
        for parts in [] if split is None else split.assigned_copies():
            for i, part in enumerate(parts):
                with in_part(i), update_on(part.device):
                    _assign_average(optimizer, variable, average)


def _assign_average(
    optimizer: BaseOptimizer, variable: keras.Variable, average: keras.Variable | None
) -> None:
    """As Keras's, past `KerasVariable.assign`, which expects the whole shape."""
    if average is None:
        return
    value, mean = tf.convert_to_tensor(variable.value), tf.convert_to_tensor(average.value)
    momentum = tf.cast(optimizer.iterations != 0, value.dtype) * optimizer.ema_momentum
    average.value.assign(momentum * mean + (1 - momentum) * value)
