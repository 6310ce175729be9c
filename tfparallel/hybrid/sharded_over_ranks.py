"""Shards on the ranks of Horovod."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES
from tfparallel.communication.horovod_collectives import hvd, start
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.horovod import HorovodExtended
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.options import Sharding
from tfparallel.sharded.sharded_variables import ShardedVariable

_STALL_TIMEOUT_S = 300.0  # as `HorovodStrategy`'s default


class RanksShardedExtended(ShardedExtended, HorovodExtended):
    """Shards on all ranks, one device each.

    Args:
        container_strategy: the strategy.
        sharding: what is in parts.
        timeouts: of which `start_s` and `stall_s` count; None: `HorovodStrategy`'s defaults.
    """

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        sharding: Sharding,
        timeouts: WorkerTimeouts | None = None,
    ):
        timeouts = timeouts or WorkerTimeouts(stall_s=_STALL_TIMEOUT_S)
        start(False, SENT_BUCKET_BYTES, timeouts.start_s)
        options = {"predivide": 1.0, "bucket_bytes": SENT_BUCKET_BYTES}
        super().__init__(container_strategy, hvd.global_process_set, False, False, options)
        self._sharding = sharding
        if timeouts.stall_s is not None:
            self._watch_for_stalls(timeouts.stall_s)

    def _host_gather_parts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._collectives.all_gather_each(parts)

    def _host_reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        return self._host_scatter_sum(rows)

    def _is_held_alike(self, variable: object) -> bool:
        """Whether a rank has the same of `variable` as the others."""
        return not isinstance(variable, ShardedVariable)
