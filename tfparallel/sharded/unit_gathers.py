"""What a unit and its backward pass ask of the strategy: wholes before it, sums behind it."""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tfparallel.replicas.noise_probe import NoiseProbe
from tfparallel.sharded.options import Sharding


class UnitGathers(Protocol):
    """How an `extended` gathers parts and sums gradients of them; `ShardedExtended` does."""

    _sharding: Sharding
    _noise_probe: NoiseProbe | None

    def _wholes(
        self,
        variables: Sequence[tf.Variable],
        parts: Sequence[Sequence[tf.Tensor]],
        i: int,
        sent_as: str | None = None,
    ) -> list[tf.Tensor]:
        """The wholes of sharded variables on the device of replica `i`, gathered together."""

    def _reduce_scatter(self, padded: list[tf.Tensor]) -> list[tf.Tensor]:
        """This replica's shard of the sums of whole, padded gradients."""

    def _shard_of(self, i: int) -> int:
        """The shard that replica `i` of this process updates."""
