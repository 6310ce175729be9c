"""Shards on the devices of the workers of `TF_CONFIG`."""

import tensorflow as tf

from tfparallel.communication.collectives import Collectives
from tfparallel.communication.ring_collectives import RingCollectives
from tfparallel.communication.stock_collectives import StockCollectives
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.hybrid.collectives_of_groups import ring_among, stock_among
from tfparallel.hybrid.groups_of_workers import WorkerGroup, check_copies, groups_around
from tfparallel.hybrid.meets_in_copies import MeetsInCopies
from tfparallel.sharded.options import Sharding


class WorkersShardedExtended(MeetsInCopies, MultiWorkerExtended):
    """Shards on the devices of all workers.

    Args:
        container_strategy: the strategy.
        cluster_resolver: of `TF_CONFIG`.
        sharding: what is in parts.
        transport: "ring" takes the ring where there is one; "collectives" TensorFlow's; "auto"
            TensorFlow's where they are NCCL's, else the ring.
        num_copies: by which the workers are divided, neighbours sharing one.
        timeouts: how long workers wait for one another.

    Raises:
        ValueError: if the workers cannot be divided so.
    """

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        sharding: Sharding,
        transport: str = "auto",
        num_copies: int = 1,
        timeouts: WorkerTimeouts | None = None,
    ):
        options = tf.distribute.experimental.CommunicationOptions()
        timeouts = timeouts or WorkerTimeouts()
        super().__init__(container_strategy, cluster_resolver, options, None, timeouts)
        rank, num_workers = self._id_in_cluster, self._num_workers
        check_copies(num_copies, num_workers, rank)
        self._sharding, self._num_copies = sharding, num_copies
        has_ring = transport != "collectives" and self._ring_all_reduce is not None

        def among(group: WorkerGroup) -> Collectives:
            return ring_among(self, group, timeouts) if has_ring else stock_among(self, group)

        if 1 < num_copies < num_workers:
            of_copy, of_part = groups_around(rank, num_workers, num_copies)
            self._in_copy, self._across = among(of_copy), among(of_part)
        else:
            self._meet_among_all(transport)

    def _meet_among_all(self, transport: str) -> None:
        """On GPUs in one order with the gradients that are summed there."""
        place = self._host_device, self._num_workers, self._id_in_cluster
        ring = self._ring_all_reduce
        self._on_gpus = []
        if transport != "ring" and self._can_meet_on_gpus:
            self._on_gpus = [
                StockCollectives(self._operations_of_gpu(i), device, *place[1:])
                for i, device in enumerate(self._devices)
            ]
        if transport != "collectives" and ring is not None:
            self._in_copy = RingCollectives(ring, *place)
        else:
            self._in_copy = StockCollectives(self._host_cross_device_ops, *place)
