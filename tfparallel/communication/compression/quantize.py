"""Gradients rounded at random to a few levels, so that the expectation is right."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.buckets import Ranks
from tfparallel.communication.compression.compressor import Compressor, num_elements
from tfparallel.communication.compression.packing import pack_bits, unpack_bits

_SEEDS_PER_RANK = 1 << 32


class _RandomRounding(Compressor):
    """Values of a chunk become multiples of `largest / levels`, rounded up or down at random."""

    def __init__(self, bits: int, chunk: int | None):
        self._bits, self._levels = bits, 2 ** (bits - 1) - 1
        self._chunk = chunk

    def initial_state(self, shape: Sequence[int], seed: int) -> dict[str, tf.Tensor]:
        """Which draw comes next."""
        return {"counter": tf.constant([seed, 0], tf.int64)}

    def compress(
        self, tensor: tf.Tensor, state: Mapping[str, tf.Variable], ranks: Ranks
    ) -> tuple[list[tf.Tensor], Any]:
        """Levels, packed into uint8, and the largest absolute value of each chunk, float32."""
        size = num_elements(tensor.shape)
        chunk = self._chunk or size
        flat = tf.pad(tf.reshape(tensor, [-1]), [[0, -size % chunk]])
        rows = tf.reshape(flat, [-1, chunk])
        # A maximum does not tell of NaN, a sum does.
        poison = 0.0 * tf.reduce_sum(rows, 1, keepdims=True)
        largest = tf.reduce_max(tf.abs(rows), 1, keepdims=True) + poison
        exact = tf.math.divide_no_nan(rows, largest) * self._levels
        seed = state["counter"] + [ranks.rank * _SEEDS_PER_RANK, 0]  # ranks round independently
        levels = tf.floor(exact + tf.random.stateless_uniform(rows.shape, seed=seed))
        levels = tf.clip_by_value(levels, -self._levels, self._levels)
        numbers = tf.cast(tf.reshape(levels + self._levels, [-1])[:size], tf.uint8)
        return [pack_bits(numbers, self._bits), largest[:, 0]], tensor.shape

    def decompress(self, payload: Sequence[tf.Tensor], context: Any) -> tf.Tensor:
        """Levels times the size of one level."""
        size = context.num_elements()
        chunk = self._chunk or size
        numbers = tf.cast(unpack_bits(payload[0], self._bits, size), tf.float32) - self._levels
        rows = tf.reshape(tf.pad(numbers, [[0, -size % chunk]]), [-1, chunk])
        values = rows * (payload[1] / self._levels)[:, tf.newaxis]
        return tf.reshape(tf.reshape(values, [-1])[:size], context)

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Levels, and a scale for each chunk."""
        size = num_elements(shape)
        return -(-size * self._bits // 8) + 4 * -(-size // (self._chunk or size))


@checks_types
class QSGD(_RandomRounding):
    """Rounds the values of a gradient at random to `2**bits - 1` levels, chunk by chunk.

    The expectation is the gradient. Levels cannot be added by a ring: they are all-gathered. A rank
    sends `(bits / 8 + 4 / 512) * size * (N - 1)` bytes; 8 bits save over the uncompressed ring for
    fewer than 8 ranks, 4 bits for fewer than 16. Vectors are sent uncompressed.

    Differs from the paper: levels are relative to the largest value of a chunk, as in its
    experiments, and they have a fixed number of bits.

    Args:
        bits: 2, 4 or 8 for each value.

    Source: QSGD, Alistarh et al., https://arxiv.org/abs/1610.02132.
    """

    def __init__(self, bits: int = 8):
        if bits not in (2, 4, 8):
            raise ValueError(f"`bits` of QSGD must be 2, 4 or 8. Received: {bits!r}.")
        super().__init__(bits, chunk=512)

    def __repr__(self) -> str:
        return f"QSGD(bits={self._bits})"


class TernGrad(_RandomRounding):
    """Rounds each value of a gradient at random to -1, 0 or 1 times its largest absolute value.

    The expectation is the gradient; the variance is large. Two bits for each value, all-gathered: a
    rank sends `size / 4 * (N - 1)` bytes. Vectors are sent uncompressed.

    Source: TernGrad, Wen et al., https://arxiv.org/abs/1705.07878, without its clipping, and with a
    scale for each rank.
    """

    def __init__(self) -> None:
        super().__init__(bits=2, chunk=None)

    def __repr__(self) -> str:
        return "TernGrad()"
