"""Tensors as one vector: a collective has a price for each call."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals.ordered_sums import sum_in_order


def join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """All values of tensors of one dtype, one after the other, `[size]`."""
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def split(joined: tf.Tensor, shapes: Sequence[tf.Tensor | Sequence[int]]) -> list[tf.Tensor]:
    """The tensors that `join` has joined.

    Args:
        joined: `[size]`.
        shapes: of the tensors: lists, fully defined `tf.TensorShape`s, or what `tf.shape` gives.
    """
    if len(shapes) == 1:
        return [tf.reshape(joined, shapes[0])]
    sizes = [tf.reduce_prod(x) if tf.is_tensor(x) else math.prod(x) for x in shapes]
    pieces = tf.split(joined, sizes)
    return [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def tensor_of(value: object) -> tf.Tensor:
    """A tensor itself, or what tells where IndexedSlices are."""
    return value.values if isinstance(value, tf.IndexedSlices) else value


def add_tensors(parts: Sequence) -> tf.Tensor | tf.IndexedSlices:
    """The sum of dense tensors, or of IndexedSlices, whose rows stay apart."""
    if len(parts) == 1:
        return parts[0]
    if not any(isinstance(part, tf.IndexedSlices) for part in parts):
        return sum_in_order(parts)
    values = tf.concat([part.values for part in parts], 0)
    indices = tf.concat([part.indices for part in parts], 0)
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)
