"""Tensors as bytes, and small numbers in a part of a byte each."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.communication.joining import join


def pack_bytes(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The bytes of tensors of static shapes, one after the other, uint8 `[size_bytes]`."""
    return join([_as_bytes(tensor) for tensor in tensors])


def unpack_bytes(data: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What `pack_bytes` packed, given tensors of the same dtypes and shapes."""
    sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in like]
    parts = tf.split(data, sizes)
    return [_from_bytes(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def pack_bits(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    """Numbers of 0 to `2**bits - 1`, `8 / bits` to a byte.

    Args:
        numbers: uint8 `[size]`.
        bits: 1, 2, 4 or 8.

    Returns:
        uint8 `[ceil(size * bits / 8)]`.
    """
    if bits == 8:
        return numbers
    per_byte = 8 // bits
    missing = -numbers.shape[0] % per_byte
    rows = tf.reshape(tf.pad(numbers, [[0, missing]]), [-1, per_byte])
    packed = rows[:, 0]
    for i in range(1, per_byte):
        packed = tf.bitwise.bitwise_or(packed, tf.bitwise.left_shift(rows[:, i], _byte(bits * i)))
    return packed


def unpack_bits(packed: tf.Tensor, bits: int, size: int) -> tf.Tensor:
    """What `pack_bits` packed: uint8 `[size]`."""
    if bits == 8:
        return packed
    shifts = tf.constant(list(range(0, 8, bits)), tf.uint8)
    numbers = tf.bitwise.right_shift(packed[:, tf.newaxis], shifts)
    numbers = tf.bitwise.bitwise_and(numbers, _byte(2**bits - 1))
    return tf.reshape(numbers, [-1])[:size]


def _byte(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint8)


def _as_bytes(tensor: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.dtype == tf.uint8 else tf.bitcast(tensor, tf.uint8)


def _from_bytes(part: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    if like.dtype == tf.uint8:
        return tf.reshape(part, like.shape)
    shape = [*like.shape, like.dtype.size] if like.dtype.size > 1 else like.shape
    return tf.bitcast(tf.reshape(part, shape), like.dtype)
