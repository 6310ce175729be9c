"""Which replicas share a copy of the state, each a shard of it, and how they meet.

             worker 0              worker 1
one copy     shard 0 | shard 1     shard 2 | shard 3
two copies   shard 0 | shard 1     shard 0 | shard 1      hybrid sharding: one in each worker

             worker 0    worker 1    worker 2    worker 3
two copies   shard 0     shard 1     shard 0     shard 1      one in each host of two workers
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.replicas.extended import ReplicatedExtended


class SharesCopies(ReplicatedExtended):
    """The arithmetic of it, and the transport.

    Attributes:
        _num_copies: that the replicas of the strategy share: neighbours have one together.
    """

    _num_copies = 1

    # ---- the transport: this process is all there is ---------------------------------------------

    def _gather_over_processes(self, parts: Sequence[tf.Tensor], i: int = 0) -> list[tf.Tensor]:
        """Of each `[length]` that of the workers that share a copy, for replica `i` of this one."""
        del i
        return list(parts)

    def _scatter_over_processes(self, rows: tf.Tensor) -> tf.Tensor:
        """This worker's row of the sum of all workers' `[num_sharing, length]`."""
        return rows[0]

    # ---- who has what ----------------------------------------------------------------------------

    @property
    def _own_workers(self) -> int:
        """How many workers the strategy has, not those around a mesh of this process."""
        return 1 if self._workers is not None else self._num_workers

    @property
    def _num_sharing(self) -> int:
        """How many workers share one copy."""
        return max(1, self._own_workers // self._num_copies)

    @property
    def _devices_of_copy(self) -> int:
        """How many devices of this process share one copy, one behind the other."""
        return len(self._devices) * self._own_workers // (self._num_copies * self._num_sharing)

    @property
    def _num_shards(self) -> int:
        return self._num_sharing * self._devices_of_copy

    def _shard_of(self, i: int) -> int:
        """The shard that replica `i` of this process updates."""
        count = self._devices_of_copy
        return (self._id_in_cluster % self._num_sharing) * count + i % count

    @property
    def _is_in_first_copy(self) -> bool:
        """Whether the replicas of this process share the first copy, or all of them."""
        return self._id_in_cluster < self._num_sharing

    def _sharing_with(self, i: int) -> range:
        """The replicas of this process that share a copy with replica `i`."""
        count = self._devices_of_copy
        return range(i // count * count, (i // count + 1) * count)
