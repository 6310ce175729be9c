"""Gradients in parts are clipped where they are.

Keras would square, and scale, the whole of each. Between devices go sums of squares, and what all
are multiplied with:

    device 0    g0 -> |g0|^2 --.             .--> g0 * scale
                                + -> scale --+
    device 1    g1 -> |g1|^2 --'             '--> g1 * scale

A sparse gradient, of an Embedding, has its rows in one place, and is clipped as one device does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import BaseOptimizer
from tfparallel.replicas.clipping import (
    clipped_by_norm,
    clips_by_norm,
    scaled_gradient,
    sum_of_squares,
)
from tfparallel.tensor_parallel.gradients import as_whole
from tfparallel.tensor_parallel.known_parts import known_parts


def clipping_hooks(optimizer: BaseOptimizer) -> Mapping[str, Callable]:
    """Methods of `optimizer` that act otherwise on gradients in parts."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return {}  # its inner optimizer clips
    return {"_clip_gradients": lambda original, grads: _clip(optimizer, original, list(grads))}


def _clip(optimizer: BaseOptimizer, clip_gradients: Callable, gradients: Sequence) -> Any:
    if not any(known_parts(gradient) for gradient in gradients):
        return clip_gradients(gradients)
    if clips_by_norm(optimizer):
        squares = [squares_in_parts(gradient) for gradient in gradients]
        return clipped_by_norm(optimizer, gradients, squares, scaled_in_parts)
    limit = optimizer.clipvalue
    if not limit or limit <= 0:
        return gradients
    whole = iter(clip_gradients([g for g in gradients if known_parts(g) is None]))
    return [
        next(whole)
        if known_parts(gradient) is None
        else _of_parts(gradient, lambda part: tf.clip_by_value(part, -limit, limit))
        for gradient in gradients
    ]


def squares_in_parts(gradient: Any) -> tf.Tensor:
    """The sum of squares of a gradient, which may be in parts: each is squared where it is."""
    known = known_parts(gradient)
    if known is None:
        return sum_of_squares(gradient)
    squares = []
    for part in known[1]:
        with tf.device(part.device):
            squares.append(sum_of_squares(part))
    return tf.add_n(squares)


def scaled_in_parts(gradient: Any, scale: tf.Tensor) -> Any:
    """A gradient, which may be in parts, times a number."""
    if known_parts(gradient) is None:
        return scaled_gradient(gradient, scale)
    return _of_parts(gradient, lambda part: scaled_gradient(part, scale))


def _of_parts(gradient: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """What `function` makes of each part of a gradient, on the part's device."""
    known = known_parts(gradient)
    assert known is not None
    rows, parts = known
    results = []
    for part in parts:
        with tf.device(part.device):
            results.append(function(part))
    return as_whole(results, rows)
