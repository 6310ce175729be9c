"""How a tensor travels whose dtype a transport does not know, without losing a bit."""

from collections.abc import Callable, Container

import tensorflow as tf

_WIDER = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
    tf.bfloat16: tf.float32,
    tf.float16: tf.float32,
}
_WORDS = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64, 16: tf.int64}

Collective = Callable[[tf.Tensor], tf.Tensor]


def summed_by(collective: Collective, tensor: tf.Tensor, known: Container[tf.DType]) -> tf.Tensor:
    """A sum of `tensor` by a collective that adds `known` dtypes, others as one that holds it."""
    dtype = tensor.dtype
    if dtype in known:
        return collective(tensor)
    if dtype.is_complex:
        parts = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
        total = collective(parts)
        return tf.complex(total[..., 0], total[..., 1])
    return tf.cast(collective(tf.cast(tensor, _WIDER[dtype])), dtype)


def moved_by(collective: Collective, tensor: tf.Tensor, known: Container[tf.DType]) -> tf.Tensor:
    """What a collective makes of `tensor` that only moves it, of dtypes beyond `known` as words.

    Words of several numbers are a last axis of their own; those of two bytes travel as float16,
    where that is known, and narrow ones as int32.
    """
    dtype = tensor.dtype
    if dtype in known:
        return collective(tensor)
    if dtype.size == 2 and tf.float16 in known:
        return tf.bitcast(collective(tf.bitcast(tensor, tf.float16)), dtype)
    return from_words(collective(as_words(tensor)), dtype)


def as_words(tensor: tf.Tensor) -> tf.Tensor:
    """The bits of `tensor` as int32 or int64, of which sums with zeros are themselves.

    Raises:
        TypeError: for a tensor of no numbers.
    """
    if tensor.dtype.size not in _WORDS:
        raise TypeError(f"Collectives carry numbers. Received: a tensor of {tensor.dtype.name}.")
    word = _WORDS[tensor.dtype.size]
    bits = tf.cast(tensor, word) if tensor.dtype == tf.bool else _bitcast(tensor, word)
    return tf.cast(bits, tf.int32) if word.size < 4 else bits


def from_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The tensor of `dtype` that `as_words` has made `words` of."""
    bits = tf.cast(words, _WORDS[dtype.size])
    return tf.cast(bits, dtype) if dtype == tf.bool else _bitcast(bits, dtype)


def _bitcast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)
