"""Shards on the devices of the workers of `TF_CONFIG`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfparallel.communication.collectives import Collectives
from tfparallel.communication.ring_collectives import RingCollectives
from tfparallel.communication.stock_collectives import StockCollectives
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.options import Sharding


class WorkersShardedExtended(ShardedExtended, MultiWorkerExtended):
    """Shards on the devices of all workers.

    Args:
        container_strategy: the strategy.
        cluster_resolver: of `TF_CONFIG`.
        sharding: what is in parts.
        uses_ring: whether parts go through the ring where there is one; else through TensorFlow's
            collectives.
        num_copies: 1, or one for each worker, which is in parts on the worker's devices.
        timeouts: how long workers wait for one another.

    Raises:
        ValueError: for another number of copies.
    """

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        cluster_resolver: Any,
        sharding: Sharding,
        uses_ring: bool = True,
        num_copies: int = 1,
        timeouts: WorkerTimeouts | None = None,
    ):
        options = tf.distribute.experimental.CommunicationOptions()
        super().__init__(
            container_strategy, cluster_resolver, options, None, timeouts or WorkerTimeouts()
        )
        if num_copies not in (1, self._num_workers):
            raise ValueError(
                f"Over {self._num_workers} workers there is one copy, or one in each worker: "
                f"`replicas` is 1 or {self._num_workers}. Received: {num_copies}. (Rank "
                f"{self._id_in_cluster} is speaking.)"
            )
        self._sharding, self._num_copies = sharding, num_copies
        self._parts_ring = self._ring_all_reduce if uses_ring else None

    def _host_gather_parts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._parts.all_gather_each(parts)

    def _host_reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        return self._parts.reduce_scatter(rows)

    @property
    def _parts(self) -> Collectives:
        """What parts of variables and their gradients go through."""
        place = self._host_device, self._num_workers, self._id_in_cluster
        if self._parts_ring is not None:
            return RingCollectives(self._parts_ring, *place)
        return StockCollectives(self._host_cross_device_ops, *place)
