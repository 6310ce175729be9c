"""Random values of a gradient travel, the same places on all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.buckets import Ranks
from tfparallel.communication.compression.compressor import Compressor, num_elements, poison_of
from tfparallel.communication.compression.top_k import checked_ratio, num_sent, placed


@checks_types
class RandomK(Compressor):
    """Sends values at random places, drawn from a seed that all ranks share: a ring can add them.

    A gradient is cut into `k` neighbourhoods of (nearly) equal size, and one value of each is sent.
    Vectors are sent uncompressed.

    Args:
        ratio: how much of each gradient is sent, above 0 and below 1.
        error_feedback: keep what is not sent for later steps. Otherwise it is lost, and what is
            sent is scaled up so that the expectation is right.

    Source: Sparsified SGD with memory, Stich et al., https://arxiv.org/abs/1809.07599.
    """

    is_linear = True

    def __init__(self, ratio: float = 0.1, error_feedback: bool = True):
        self._ratio = checked_ratio("RandomK", ratio, 1.0)
        self.has_error_feedback = error_feedback

    def __repr__(self) -> str:
        return f"RandomK({self._ratio:g}, error_feedback={self.has_error_feedback})"

    def initial_state(self, shape: Sequence[int], seed: int) -> dict[str, tf.Tensor]:
        """What is left out, and which draw comes next."""
        return {**super().initial_state(shape, seed), "counter": tf.constant([seed, 0], tf.int64)}

    def compress(
        self, tensor: tf.Tensor, state: Mapping[str, tf.Variable], ranks: Ranks
    ) -> tuple[list[tf.Tensor], Any]:
        """Values float32 `[k]`; their places are known to all."""
        del ranks
        size, k = num_elements(tensor.shape), num_sent(tensor.shape, self._ratio)
        bounds = np.arange(k + 1, dtype="int64") * size // k
        lengths = tf.constant(np.diff(bounds), tf.float32)
        draw = tf.random.stateless_uniform([k], seed=state["counter"])
        # float32 may round a draw up to the length itself.
        steps = tf.minimum(tf.floor(draw * lengths), lengths - 1)
        indices = tf.constant(bounds[:-1], tf.int32) + tf.cast(steps, tf.int32)
        flat = tf.reshape(tensor, [-1])
        values = tf.gather(flat, indices) + poison_of(flat)
        scale = 1.0 if self.has_error_feedback else lengths
        return [values * scale], (indices, tensor.shape)

    def decompress(self, payload: Sequence[tf.Tensor], context: Any) -> tf.Tensor:
        """The values at their places, zeros elsewhere."""
        return placed(payload[0], *context)

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Four for each value that is sent."""
        return 4 * num_sent(shape, self._ratio)
