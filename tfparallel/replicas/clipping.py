"""Clipping by norms as Keras does it, of gradients of which not all are in one place.

Keras squares whole gradients. Here the sums of squares are given, by whoever knows all parts.
"""

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from tfparallel.internals import BaseOptimizer


def clips_by_norm(optimizer: BaseOptimizer) -> bool:
    """Whether `optimizer` clips by the norm of each gradient, or of all."""
    return bool(optimizer.clipnorm or optimizer.global_clipnorm)


def sum_of_squares(gradient: tf.Tensor) -> tf.Tensor:
    """In 32 bits at least; of a sparse gradient its rows as they are, equal ones apart."""
    numbers = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    dtype = tf.float64 if numbers.dtype == tf.float64 else tf.float32
    return tf.reduce_sum(tf.square(tf.cast(numbers, dtype)))


def widest(numbers: Iterable[tf.Tensor]) -> tf.DType:
    """The dtype in which `numbers` are added up."""
    return tf.float64 if any(number.dtype == tf.float64 for number in numbers) else tf.float32


def sum_of_numbers(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    """Their sum, in the same bits wherever it is computed, as replicas have to agree on a norm.

    `AddN` begins with whichever number it may overwrite, in each replica and step another one. For
    arrays there is `internals.ordered_sums`, which stacks none, with an operation for each.
    """
    return tf.reduce_sum(tf.stack(numbers))


def clipped_by_norm(
    optimizer: BaseOptimizer,
    gradients: Sequence,
    squares: Sequence[tf.Tensor],
    scaled: Callable[[object, tf.Tensor], object],
) -> list:
    """`gradients` as `optimizer`, which `clips_by_norm`, clips them.

    Args:
        squares: of each gradient the sum over all its parts.
        scaled: multiplies one with a number.
    """
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        limit = optimizer.clipnorm
        scales = [limit / tf.maximum(tf.sqrt(square), limit) for square in squares]
        return [scaled(gradient, scale) for gradient, scale in zip(gradients, scales, strict=True)]
    dtype, limit = widest(squares), optimizer.global_clipnorm
    norm = tf.sqrt(sum_of_numbers([tf.cast(square, dtype) for square in squares]))
    # As Keras's: gradients of which one is not finite become NaN, and sparse ones become dense.
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    return [scaled(dense_of(gradient), scale) for gradient in gradients]


def dense_of(gradient: tf.Tensor) -> tf.Tensor:
    """A sparse gradient as a dense one; another as it is."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def scaled_gradient(gradient: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """`gradient * scale`, in the gradient's dtype."""
    if isinstance(gradient, tf.IndexedSlices):
        values = scaled_gradient(gradient.values, scale)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(scale, gradient.dtype)
