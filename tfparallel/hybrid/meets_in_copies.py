"""How parts are gathered and gradients of them summed, whatever carries them between workers."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.communication.collectives import Collectives
from tfparallel.sharded.extended import ShardedExtended


class MeetsInCopies(ShardedExtended):
    """The transport of `SharesCopies`, through collectives of the groups of a worker.

    Attributes:
        _in_copy: of the workers that share a copy with this one; set when the strategy is built.
        _across: of those that store the same part; None where all share one copy, or none do.
        _meets_on_gpus: whether `_in_copy` is between GPUs, one of each worker, by NCCL.
    """

    _has_nccl: bool
    _in_copy: Collectives
    _across: Collectives | None = None
    _meets_on_gpus = False

    @property
    def _can_meet_on_gpus(self) -> bool:
        """Whether all workers share one copy, NCCL is there, and parts are on one GPU of each.

        NCCL's groups of a GPU could wait for one another: it has one, of all workers.
        """
        is_one_copy = self._num_copies == 1 and len(self._devices) == 1
        return self._has_nccl and is_one_copy and self._sharding.host is None

    @property
    def _meeting_device(self) -> str:
        return self._devices[0] if self._meets_on_gpus else super()._meeting_device

    def _host_gather_parts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._in_copy.all_gather_each(parts)

    def _host_reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        own = self._in_copy.reduce_scatter(rows)
        return own if self._across is None else self._across.all_reduce(own)
