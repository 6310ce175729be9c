"""Shards on the devices of the workers of `TF_CONFIG`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfparallel.communication.collectives import Collectives
from tfparallel.communication.ring_all_reduce import RingAllReduce
from tfparallel.communication.ring_collectives import RingCollectives
from tfparallel.communication.stock_collectives import StockCollectives
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.hybrid.rings_of_copies import open_rings
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
        num_copies: by which the workers are divided, neighbours sharing one.
        timeouts: how long workers wait for one another.

    Raises:
        ValueError: if the workers cannot be divided so, or would share a copy without the ring.
    """

    _copies_ring: RingAllReduce | None = None  # of those that store the same part as this worker

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
        timeouts = timeouts or WorkerTimeouts()
        super().__init__(container_strategy, cluster_resolver, options, None, timeouts)
        if num_copies < 1 or self._num_workers % num_copies:
            raise ValueError(
                f"{self._num_workers} workers must be a multiple of the copies that they share. "
                f"Received: {num_copies} `replicas`. (Rank {self._id_in_cluster} is speaking.)"
            )
        self._sharding, self._num_copies = sharding, num_copies
        self._parts_ring = self._ring_all_reduce if uses_ring else None
        if 1 < num_copies < self._num_workers:
            self._check_has_ring()
            self._parts_ring, self._copies_ring = open_rings(self, num_copies, timeouts)

    def _check_has_ring(self) -> None:
        if self._parts_ring is None:
            raise ValueError(
                "Several copies, each of several workers, are shared through the ring: "
                f'transport="ring", and workers that reach one another at free ports. Received: '
                f"{self._num_copies} `replicas` of {self._num_workers} workers without it. (Rank "
                f"{self._id_in_cluster} is speaking.)"
            )

    def _host_gather_parts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._parts.all_gather_each(parts)

    def _host_reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        own = self._parts.reduce_scatter(rows)
        if self._copies_ring is None:
            return own
        with tf.device(self._host_device):
            return self._copies_ring.sum_of(own)

    @property
    def _parts(self) -> Collectives:
        """What parts of variables and their gradients go through."""
        rank, size = self._id_in_cluster, self._num_workers
        if self._copies_ring is not None:
            size //= self._num_copies
        place = self._host_device, size, rank % size
        if self._parts_ring is not None:
            return RingCollectives(self._parts_ring, *place)
        return StockCollectives(self._host_cross_device_ops, *place)
