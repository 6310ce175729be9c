"""Shards on the devices of one process."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.replicas.local import LocalExtended
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.options import Sharding


class LocalShardedExtended(ShardedExtended, LocalExtended):
    """Shards on the devices of this process.

    Args:
        container_strategy: the strategy.
        devices: None takes all. With several copies, those of a copy are next to one another.
        sharding: what is in parts.
        num_copies: among which the devices are divided; each is in parts on its devices.

    Raises:
        ValueError: if the devices cannot be divided so.
    """

    _places_batches = True

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        devices: Sequence[str] | None,
        sharding: Sharding,
        num_copies: int = 1,
    ):
        super().__init__(container_strategy, devices)
        if num_copies < 1 or len(self._devices) % num_copies:
            raise ValueError(
                f"{len(self._devices)} devices must be a multiple of the copies that they share. "
                f"Received: {num_copies} `replicas`."
            )
        self._sharding, self._num_copies = sharding, num_copies
