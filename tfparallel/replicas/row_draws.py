"""Random numbers of some rows of a batch: those that one device draws for these rows.

TensorFlow's generator counts: four numbers (two of float64) come of each value of a counter, one
behind the other. So the numbers of rows 40 to 49 are drawn without those of the rows before:

    tf.random.stateless_uniform([100, 5], seed)[40:50]     500 numbers, of which 50 are taken
    counter + 40 * 5 / 4                                   the same 50

Truncated normal numbers reject some and draw again. Each four of them begin at a multiple of 256
values of the counter, however many values those before have taken (TensorFlow's
`kReservedSamplesPerOutput`, in `core/kernels/random_op_cpu.h`, and the same on GPUs):

    counter + 40 * 5 / 4 * 256                             the same 50, if truncated

Where XLA compiles it, normal numbers are in another order: there it is not for them.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (Philox),
https://doi.org/10.1145/2063384.2063405
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.internals.keras_integers import PHILOX, key_and_counter

_COUNTS_OF_TRUNCATED = 64  # values of the counter that are kept for a number, of which four come


def uniform_of_rows(
    shape: Sequence[int] | tf.Tensor, first_row: int | tf.Tensor, seed: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Rows of what `tf.random.stateless_uniform` draws for all rows, in [0, 1).

    Args:
        shape: of the rows, `[rows, ...]`.
        first_row: how many rows are before them, a scalar.
        seed: an int32 tensor `[2]`.
        dtype: of floating point.
    """
    return _numbers_of_rows(tf.raw_ops.StatelessRandomUniformV2, shape, first_row, seed, dtype)


def normal_of_rows(
    shape: Sequence[int] | tf.Tensor, first_row: int | tf.Tensor, seed: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Rows of what `tf.random.stateless_normal` draws for all rows, of mean 0 and deviation 1.

    Args:
        shape, first_row, seed, dtype: as of `uniform_of_rows`.
    """
    return _numbers_of_rows(tf.raw_ops.StatelessRandomNormalV2, shape, first_row, seed, dtype)


def truncated_normal_of_rows(
    shape: Sequence[int] | tf.Tensor, first_row: int | tf.Tensor, seed: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Rows of what `tf.random.stateless_truncated_normal` draws for all rows, as `normal_of_rows`.

    Args:
        shape, first_row, seed, dtype: as of `uniform_of_rows`.
    """
    draw = tf.raw_ops.StatelessTruncatedNormalV2
    return _numbers_of_rows(draw, shape, first_row, seed, dtype, is_rejecting=True)


def seed_as_drawn(seed: tf.Tensor) -> tf.Tensor:
    """A seed `[2]` of Keras's, int32, as Keras's draws give it to TensorFlow."""
    if seed.dtype == tf.int32:
        return seed
    return tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)


def _numbers_of_rows(
    draw: Callable,
    shape: Sequence[int] | tf.Tensor,
    first_row: int | tf.Tensor,
    seed: tf.Tensor,
    dtype: tf.DType,
    is_rejecting: bool = False,
) -> tf.Tensor:
    # Sizes are int32, which GPUs leave on the host, and never as large as the numbers of a batch.
    shape, first_row = tf.cast(shape, tf.int32), tf.cast(first_row, tf.int32)
    of_a_count = 2 if dtype == tf.float64 else 4
    in_a_row = tf.reduce_prod(shape[1:])
    left_out = (first_row % of_a_count) * (in_a_row % of_a_count) % of_a_count
    counts = tf.cast(first_row, tf.int64) * tf.cast(in_a_row, tf.int64) // of_a_count
    if is_rejecting:
        counts *= of_a_count * _COUNTS_OF_TRUNCATED
    key, counter = key_and_counter(seed)
    flat = draw(
        shape=tf.stack([left_out + shape[0] * in_a_row]),
        key=key,
        counter=_advanced(counter, counts),
        alg=PHILOX,
        dtype=dtype,
    )
    return tf.reshape(flat[left_out:], shape)


def _advanced(counter: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
    """`counter + steps`, where `counter` are 128 bits, the lower ones first."""
    low = counter[0] + tf.cast(steps, tf.uint64)
    return tf.stack([low, counter[1] + tf.cast(low < counter[0], tf.uint64)])
