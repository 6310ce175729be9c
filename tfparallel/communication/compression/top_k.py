"""Only the largest values of a gradient travel; the rest waits for the next step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.buckets import Ranks
from tfparallel.communication.compression.compressor import Compressor, num_elements, poison_of

_SAMPLED_FROM = 1 << 16  # below, sorting all values is fast enough
_SAMPLE = 1 << 14


@checks_types
class TopK(Compressor):
    """Sends the largest values of each gradient with their indices, 8 bytes each.

    Every rank chooses its own values, so that a ring cannot add them: they are all-gathered, and a
    rank sends `8 * ratio * size * (N - 1)` bytes. Against `4 * size * 2 (N - 1) / N` of the
    uncompressed ring this pays up to `N = 1 / ratio` ranks. What is not sent is kept (error
    feedback). Vectors are sent uncompressed.

    Args:
        ratio: how much of each gradient is sent, above 0 and below 0.5.

    Source: Deep gradient compression, Lin et al., https://arxiv.org/abs/1712.01887, without its
    momentum correction, clipping and warm-up.
    """

    has_error_feedback = True

    def __init__(self, ratio: float = 0.01):
        self._ratio = checked_ratio("TopK", ratio, 0.5)

    def __repr__(self) -> str:
        return f"TopK({self._ratio:g})"

    def applies_to(self, shape: Sequence[int]) -> bool:
        """Matrices for which it saves anything."""
        return len(shape) >= 2 and self.payload_bytes(shape) < 4 * num_elements(shape)

    def compress(
        self, tensor: tf.Tensor, state: Mapping[str, tf.Variable], ranks: Ranks
    ) -> tuple[list[tf.Tensor], Any]:
        """Values float32 `[k]` and indices int32 `[k]`."""
        del state, ranks
        flat = tf.reshape(tensor, [-1])
        indices = largest(tf.abs(flat), num_sent(tensor.shape, self._ratio))
        return [tf.gather(flat, indices) + poison_of(flat), indices], tensor.shape

    def decompress(self, payload: Sequence[tf.Tensor], context: Any) -> tf.Tensor:
        """The values at their places, zeros elsewhere."""
        return placed(payload[0], payload[1], context)

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Value and index, four bytes each."""
        return 8 * num_sent(shape, self._ratio)


def largest(values: tf.Tensor, k: int) -> tf.Tensor:
    """Indices of the `k` largest of `values` `[size]`, int32, in no order.

    Of many values, only those are sorted that exceed a threshold estimated from a sample.
    """

    def of_all() -> tf.Tensor:
        return tf.math.top_k(values, k, sorted=False).indices

    size = values.shape[0]
    if size < _SAMPLED_FROM:
        return of_all()
    sample = values[:: size // _SAMPLE]
    expected = sample.shape[0] * k / size
    rank_in_sample = min(sample.shape[0], math.ceil(expected + 3 * math.sqrt(expected) + 1))
    threshold = tf.math.top_k(sample, rank_in_sample).values[-1]
    candidates = tf.cast(tf.where(values >= threshold)[:, 0], tf.int32)

    def of_candidates() -> tf.Tensor:
        chosen = tf.math.top_k(tf.gather(values, candidates), k, sorted=False).indices
        return tf.gather(candidates, chosen)

    indices = tf.cond(tf.size(candidates) >= k, of_candidates, of_all)
    return tf.ensure_shape(indices, [k])


def placed(values: tf.Tensor, indices: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """A tensor of `shape` with `values` at flat `indices`."""
    flat = tf.scatter_nd(indices[:, tf.newaxis], values, [shape.num_elements()])
    return tf.reshape(flat, shape)


def num_sent(shape: Sequence[int], ratio: float) -> int:
    """How many values of a tensor are sent: at least one."""
    return max(1, math.ceil(ratio * num_elements(shape)))


def checked_ratio(name: str, ratio: float, limit: float) -> float:
    """`ratio`, if it is above 0 and below `limit`.

    Raises:
        ValueError: otherwise.
    """
    if not 0 < ratio < limit:
        raise ValueError(
            f"`ratio` of {name} must be above 0 and below {limit:g}: the part of each gradient "
            f"that is sent. Received: {ratio!r}."
        )
    return float(ratio)
