"""Buckets of gradients, and how those of one step are reduced one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfparallel.communication.compression.transport import (
    Reduction,
    Rounds,
    Sum,
    Transport,
    run_together,
)

State = dict[str, tf.Variable]


@dataclass(frozen=True)
class Ranks:
    """Who takes part: `rank` of `world_size`."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together: float32 tensors, and the state of each."""

    tensors: list[tf.Tensor]
    states: list[State]


class BucketReducer(tf.Module):
    """Reduces the buckets of one step; may remember how from step to step."""

    def reduce(
        self, buckets: Sequence[Bucket], plain: list[tf.Tensor], transport: Transport
    ) -> list[Reduction]:
        """Sums over ranks.

        Args:
            buckets: in the order in which their gradients become ready; some may be empty.
            plain: what is sent uncompressed.
            transport: the collectives.

        Returns:
            One for each bucket, and one more for `plain`.
        """
        raise NotImplementedError

    def compressor_of(self, bucket: int) -> Any:
        """The compressor that a bucket's gradients are sent by at present; None: uncompressed."""
        raise NotImplementedError

    def decisions(self) -> list[str]:
        """What was decided so far, in words."""
        return []


class Pipelined(BucketReducer):
    """Every bucket by the same compressor; the next one begins while the last is under way."""

    def __init__(self, compressor: Any):
        super().__init__(name="pipelined")
        self._compressor = compressor

    def reduce(
        self, buckets: Sequence[Bucket], plain: list[tf.Tensor], transport: Transport
    ) -> list[Reduction]:
        """As `BucketReducer.reduce`."""
        ranks = Ranks(transport.rank, transport.world_size)
        reductions = [
            self._compressor.rounds(b.tensors, b.states, ranks) if b.tensors else uncompressed([])
            for b in buckets
        ]
        # Vectors are spread over all layers: all of them are there when the last bucket is.
        starts = [*range(len(buckets)), max(0, len(buckets) - 1)]
        return run_together([*reductions, uncompressed(plain)], starts, transport)

    def compressor_of(self, bucket: int) -> Any:
        """The one compressor."""
        del bucket
        return self._compressor


def uncompressed(tensors: list[tf.Tensor]) -> Rounds:
    """Sums tensors as they are."""
    if not tensors:
        return Reduction([])
    sums = yield Sum(tensors)
    return Reduction(sums, witnesses=[total for total in sums if total.dtype.is_floating])


def remember(reduced: Sequence[Reduction]) -> None:
    """Assigns the new states, unless a gradient of any rank was not finite."""
    updates = [update for reduction in reduced for update in reduction.updates]
    if not updates:
        return
    witnesses = [witness for reduction in reduced for witness in reduction.witnesses]
    totals = tf.stack([tf.reduce_sum(tf.cast(w, tf.float32)) for w in witnesses])

    def assign() -> tf.Tensor:
        for variable, value in updates:
            variable.assign(value, read_value=False)
        return tf.constant(True)

    # Not `tf.where`: it would read every old state and copy every new one.
    is_finite = tf.reduce_all(tf.math.is_finite(totals))
    tf.cond(is_finite, assign, lambda: tf.constant(False))
