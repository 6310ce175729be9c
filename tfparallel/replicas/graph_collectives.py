"""Collectives between the replicas of one process: operations of the graph of their step."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.internals import PerReplica, distribute_lib
from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.batch import concat_rows


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
        """As `Collectives.all_reduce`; the first device adds up, so that all get the same bits.

        `AddN` begins with whichever part it may overwrite, on each device another one.
        """

        def merge(strategy: tf.distribute.Strategy, value: object) -> PerReplica:
            first, *others = _devices_of(strategy)
            with tf.device(first):
                totals = [_added_up(strategy.experimental_local_results(value))]
            for device in others:
                with tf.device(device):
                    totals.append(tf.identity(totals[0]))
            return PerReplica(totals)

        return distribute_lib.get_replica_context().merge_call(merge, args=(tensor,))

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.reduce_scatter`: each device adds up its own row alone."""
        return _met(rows, lambda parts, i: _added_up([part[i] for part in parts]))

    def all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_gather`; also of ragged and sparse rows."""
        return self.all_gather_each([rows])[0]

    def all_gather_each(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `Collectives.all_gather_each`, of any numbers of rows."""

        def merge(strategy: tf.distribute.Strategy, *values: object) -> list[PerReplica]:
            return [
                _gathered(strategy.experimental_local_results(value), _devices_of(strategy))
                for value in values
            ]

        return distribute_lib.get_replica_context().merge_call(merge, args=tuple(parts))

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_to_all`."""
        return _met(rows, lambda parts, i: tf.stack([part[i] for part in parts]))

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.broadcast`."""
        return _met(tensor, lambda parts, i: tf.identity(parts[0]))


def _met(tensor: tf.Tensor, combine: Callable[[Sequence[tf.Tensor], int], tf.Tensor]) -> tf.Tensor:
    """`combine(what all replicas have, i)` on the device of each replica `i`."""

    def merge(strategy: tf.distribute.Strategy, value: object) -> PerReplica:
        parts = strategy.experimental_local_results(value)
        results = []
        for i, device in enumerate(_devices_of(strategy)):
            with tf.device(device):
                results.append(combine(parts, i))
        return PerReplica(results)

    return distribute_lib.get_replica_context().merge_call(merge, args=(tensor,))


def _gathered(parts: Sequence[tf.Tensor], devices: Sequence[str]) -> PerReplica:
    """All `parts` once on each device, also where it has several replicas."""
    copies = {}
    for device in dict.fromkeys(devices):
        with tf.device(device):
            copies[device] = concat_rows(parts)
    return PerReplica([copies[device] for device in devices])


def _devices_of(strategy: tf.distribute.Strategy) -> Sequence[str]:
    return strategy.extended.worker_devices


def _added_up(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    if parts[0].dtype == tf.bool:
        return tf.reduce_any(tf.stack(parts), 0)
    return sum_in_order(parts)
