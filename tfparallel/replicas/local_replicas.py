"""What cutting a batch asks of a strategy: which replicas are in this process."""

from typing import Protocol

import tensorflow as tf


class LocalReplicas(Protocol):
    """The replicas of one process among those of all.

    Names begin with an underscore where they do in `tf.distribute.StrategyExtended`, whose methods
    these are or stand beside: a user of a strategy calls none of them.
    """

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device that each replica of this process computes on."""

    @property
    def _num_replicas_in_sync(self) -> int:
        """Of all processes."""

    @property
    def _host_device(self) -> str:
        """The CPU of this process."""

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        """The number among all replicas of replica `replica_id` of this process."""

    def _sum_across_workers(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of what processes have; called in a cross-replica context."""
