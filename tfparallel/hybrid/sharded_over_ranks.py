"""Shards on the ranks of Horovod."""

import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES
from tfparallel.communication.horovod_collectives import HorovodCollectives
from tfparallel.communication.horovod_start import ProcessSet, hvd, process_sets, start
from tfparallel.coordination.ends_together import EndsTogether
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.horovod import HorovodExtended
from tfparallel.hybrid.groups_of_workers import all_groups, check_copies, groups_around
from tfparallel.hybrid.meets_in_copies import MeetsInCopies
from tfparallel.sharded.options import Sharding
from tfparallel.sharded.sharded_variables import ShardedVariable


class RanksShardedExtended(MeetsInCopies, HorovodExtended):
    """Shards on all ranks, one device each.

    Args:
        container_strategy: the strategy.
        sharding: what is in parts.
        num_copies: by which the ranks are divided, neighbours sharing one.
        timeouts: of which `start_s` and `stall_s` count.

    Raises:
        ValueError: if the ranks cannot be divided so, or Horovod runs already without process sets
            of those that share a copy.
    """

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        sharding: Sharding,
        num_copies: int,
        timeouts: WorkerTimeouts,
    ):
        def groups(num_ranks: int) -> list[Sequence[int]]:
            return [group.ranks for group in all_groups(num_ranks, num_copies)]

        start(False, SENT_BUCKET_BYTES, timeouts.start_s, groups if num_copies > 1 else None)
        check_copies(num_copies, hvd.size(), hvd.rank())
        sets = process_sets(groups(hvd.size()))
        options = {"predivide": 1.0, "bucket_bytes": SENT_BUCKET_BYTES}
        super().__init__(container_strategy, hvd.global_process_set, False, False, options)
        self._sharding, self._num_copies = sharding, num_copies
        self._meet_among_all()
        if sets:
            around = groups_around(hvd.rank(), hvd.size(), num_copies)
            self._in_copy, self._across = (self._among(sets[group.number]) for group in around)
            # To take process sets apart Horovod asks all ranks, dead ones too, and aborts.
            weakref.finalize(self, EndsTogether(self._agreement).stop)
        if timeouts.stall_s is not None:
            self._watch_for_stalls(timeouts.stall_s)

    def _meet_among_all(self) -> None:
        self._in_copy = self._collectives
        self._on_gpus = [self._on_device] if self._can_meet_on_gpus else []

    def _among(self, process_set: ProcessSet) -> HorovodCollectives:
        """Of a process set, in one order with those of all ranks, and counted with them."""
        return HorovodCollectives(process_set, self._host_device, self._collectives.order)

    def _gather_over_processes(self, parts: Sequence[tf.Tensor], i: int = 0) -> list[tf.Tensor]:
        """As the base's; outside of steps no copy has been read before all have."""
        wholes = super()._gather_over_processes(parts, i)
        if self._across is not None and tf.executing_eagerly():
            # With the first rank that ends Horovod ends for all: they read their last together.
            self._collectives.all_reduce(tf.zeros([1]))
        return wholes

    def _is_held_alike(self, variable: object) -> bool:
        """Whether a rank has the same of `variable` as the others."""
        return not isinstance(variable, ShardedVariable)
