"""Shards on the devices of the workers of `TF_CONFIG`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.internals.distribute import exchange_rows, gather_alike, launchers_of
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
        with tf.device(self._host_device):
            if self._parts_ring is not None:
                return self._parts_ring.gather_each(parts)
            if tf.executing_eagerly():  # TensorFlow gathers in functions only
                return tf.nest.flatten(tf.function(self._host_gather_parts)(parts))
            return [gather_alike(self._launcher, tf.identity(part)) for part in parts]

    def _host_reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        with tf.device(self._host_device):
            if self._parts_ring is not None:
                return self._parts_ring.reduce_scatter(rows)
            return tf.reduce_sum(exchange_rows(self._launcher, tf.identity(rows)), 0)

    @property
    def _launcher(self) -> Any:
        return launchers_of(self._host_cross_device_ops)[0]
