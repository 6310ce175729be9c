"""Gradients in parts are clipped where they are.

Keras would square, and scale, the whole of each. Between devices go sums of squares, and what all
are multiplied with:

    device 0    g0 -> |g0|^2 --.             .--> g0 * scale
                                + -> scale --+
    device 1    g1 -> |g1|^2 --'             '--> g1 * scale

A sparse gradient, of an Embedding, has its rows in one place, and is clipped as one device does.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.internals import BaseOptimizer
from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.replicas.clipping import (
    clipped_by_norm,
    clips_by_norm,
    scaled_gradient,
    sum_of_numbers,
    sum_of_squares,
    widest,
)
from tfparallel.tensor_parallel.gradient_in_parts import GradientInParts
from tfparallel.tensor_parallel.gradients import as_whole
from tfparallel.tensor_parallel.known_parts import known_parts
from tfparallel.tensor_parallel.ranks import ranks_of_caller


def clip(optimizer: BaseOptimizer, clip_gradients: Callable, gradients: Sequence) -> list:
    """`_clip_gradients` of `optimizer`, also of gradients in parts."""
    gradients = list(gradients)
    if not any(_is_in_parts(gradient) for gradient in gradients):
        return clip_gradients(gradients)
    if clips_by_norm(optimizer):
        return clipped_in_parts(optimizer, gradients, _squares(gradients))
    limit = optimizer.clipvalue
    if not limit or limit <= 0:
        return gradients
    whole = iter(clip_gradients([g for g in gradients if not _is_in_parts(g)]))
    return [
        _mapped(gradient, lambda part: tf.clip_by_value(part, -limit, limit))
        if _is_in_parts(gradient)
        else next(whole)
        for gradient in gradients
    ]


def clipped_in_parts(
    optimizer: BaseOptimizer, gradients: Sequence, squares: Sequence[tf.Tensor]
) -> list:
    """`clipped_by_norm` of gradients that may be in parts."""
    # As on one device sparse gradients are dense behind a global norm.
    scaled = _scaled_in_parts if optimizer.clipnorm else _scaled_dense
    return clipped_by_norm(optimizer, gradients, squares, scaled)


def _is_in_parts(gradient: object) -> bool:
    return isinstance(gradient, GradientInParts) or known_parts(gradient) is not None


def _squares(gradients: Sequence[Gradient | GradientInParts]) -> list[tf.Tensor]:
    """The sum of squares of each gradient; ranks exchange those of all parts at once."""
    ranks = ranks_of_caller()
    if ranks is None:
        return [squares_in_parts(gradient) for gradient in gradients]
    squares = [sum_of_squares(_own_numbers(gradient, ranks.index)) for gradient in gradients]
    is_part = [known_parts(gradient) is not None for gradient in gradients]
    dtype = widest(squares)
    of_parts = [tf.cast(x, dtype) for x, part in zip(squares, is_part, strict=True) if part]
    sums = iter(tf.unstack(ranks.all_reduce(tf.stack(of_parts)), len(of_parts)) if of_parts else [])
    return [next(sums) if part else x for x, part in zip(squares, is_part, strict=True)]


def _own_numbers(gradient: Gradient | GradientInParts, rank: int) -> Gradient:
    """What a rank adds to the squares of a gradient: its part, or all of one that all have."""
    if isinstance(gradient, GradientInParts):
        return gradient.numbers()[0]
    known = known_parts(gradient)
    return gradient if known is None else known[1][rank]


def squares_in_parts(gradient: Gradient | GradientInParts) -> tf.Tensor:
    """The sum of squares of a gradient, which may be in parts: each is squared where it is."""
    if isinstance(gradient, GradientInParts):
        numbers = gradient.numbers()
    else:
        known = known_parts(gradient)
        if known is None:
            return sum_of_squares(gradient)
        numbers = known[1]
    squares = []
    for part in numbers:
        with tf.device(part.device):
            squares.append(sum_of_squares(part))
    return sum_of_numbers(squares)


def _scaled_in_parts(
    gradient: Gradient | GradientInParts, scale: tf.Tensor
) -> Gradient | GradientInParts:
    """A gradient, which may be in parts, times a number."""
    if not _is_in_parts(gradient):
        return scaled_gradient(gradient, scale)
    return _mapped(gradient, lambda part: scaled_gradient(part, scale))


def _scaled_dense(
    gradient: Gradient | GradientInParts, scale: tf.Tensor
) -> Gradient | GradientInParts:
    dense = gradient.dense() if isinstance(gradient, GradientInParts) else gradient
    return _scaled_in_parts(dense, scale)


def _mapped(
    gradient: Gradient | GradientInParts, function: Callable[[tf.Tensor], tf.Tensor]
) -> Gradient | GradientInParts:
    """What `function` makes of each part of a gradient, on the part's device."""
    if isinstance(gradient, GradientInParts):
        return gradient.mapped(function)
    known = known_parts(gradient)
    assert known is not None
    rows, parts = known
    results = []
    for part in parts:
        with tf.device(part.device):
            results.append(function(part))
    return as_whole(results, rows)
