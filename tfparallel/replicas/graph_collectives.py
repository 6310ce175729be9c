"""Collectives between the replicas of one process: operations of the graph of their step."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.internals import PerReplica, distribute_lib
from tfparallel.internals.distribute import num_replicas


class GraphCollectives:
    """`Collectives` of the replica that calls; what is on another device is copied from there.

    For strategies whose replicas are all in this process, in a function given to `run`: nothing has
    to be matched, since one graph has all of it.
    """

    @property
    def size(self) -> int:
        """How many replicas compute."""
        return num_replicas(distribute_lib.get_replica_context().strategy)

    @property
    def index(self) -> int:
        """Which of them the caller is, known when tracing."""
        number = distribute_lib.get_replica_context().replica_id_in_sync_group
        return int(tf.get_static_value(tf.convert_to_tensor(number)))

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_reduce`."""
        return _met(tensor, lambda parts, i: _added_up(parts))

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.reduce_scatter`: each device adds up its own row alone."""
        return _met(rows, lambda parts, i: _added_up([part[i] for part in parts]))

    def all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_gather`."""
        return _met(rows, lambda parts, i: tf.concat(parts, 0))

    def all_gather_each(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `Collectives.all_gather_each`."""
        return [self.all_gather(part) for part in parts]

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_to_all`."""
        return _met(rows, lambda parts, i: tf.stack([part[i] for part in parts]))

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.broadcast`."""
        return _met(tensor, lambda parts, i: tf.identity(parts[0]))


def _met(tensor: tf.Tensor, combine: Callable[[Sequence[tf.Tensor], int], tf.Tensor]) -> tf.Tensor:
    """`combine(what all replicas have, i)` on the device of each replica `i`."""

    def merge(strategy: tf.distribute.Strategy, value: object) -> object:
        parts = strategy.experimental_local_results(value)
        results = []
        for i, device in enumerate(strategy.extended.worker_devices):
            with tf.device(device):
                results.append(combine(parts, i))
        return results[0] if len(results) == 1 else PerReplica(results)

    return distribute_lib.get_replica_context().merge_call(merge, args=(tensor,))


def _added_up(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    if parts[0].dtype == tf.bool:
        return tf.reduce_any(tf.stack(parts), 0)
    return tf.add_n(list(parts))
