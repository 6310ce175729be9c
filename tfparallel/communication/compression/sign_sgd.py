"""Only the signs of a gradient travel, and one size."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.communication.compression.buckets import Ranks
from tfparallel.communication.compression.compressor import Compressor, num_elements
from tfparallel.communication.compression.packing import pack_bits, unpack_bits


class SignSGD(Compressor):
    """Sends one bit for each value, and the mean absolute value of the gradient.

    What the signs do not tell is kept for the next step (error feedback), without which it does not
    converge in general. Signs are all-gathered: a rank sends `size / 8 * (N - 1)` bytes. Vectors
    are sent uncompressed.

    Source: Error feedback fixes SignSGD, Karimireddy et al., https://arxiv.org/abs/1901.09847.
    """

    has_error_feedback = True

    def __repr__(self) -> str:
        return "SignSGD()"

    def compress(
        self, tensor: tf.Tensor, state: Mapping[str, tf.Variable], ranks: Ranks
    ) -> tuple[list[tf.Tensor], Any]:
        """Signs, packed into uint8, and the mean absolute value, float32 `[]`."""
        del state, ranks
        signs = tf.cast(tf.reshape(tensor, [-1]) >= 0, tf.uint8)
        return [pack_bits(signs, bits=1), tf.reduce_mean(tf.abs(tensor))], tensor.shape

    def decompress(self, payload: Sequence[tf.Tensor], context: Any) -> tf.Tensor:
        """Plus or minus the mean absolute value."""
        signs = unpack_bits(payload[0], 1, context.num_elements())
        return tf.reshape((2.0 * tf.cast(signs, tf.float32) - 1.0) * payload[1], context)

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """One bit for each value."""
        return -(-num_elements(shape) // 8) + 4
