"""How parts are gathered and gradients of them summed, whatever carries them between workers."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES, plan_buckets
from tfparallel.communication.collectives import Collectives
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.sharded.extended import ShardedExtended


class MeetsInCopies(ShardedExtended):
    """The transport of `SharesCopies`, through collectives of the groups of a worker.

    Attributes:
        _in_copy: of the workers that share a copy with this one; set when the strategy is built.
        _across: of those that store the same part; None where all share one copy, or none do.
        _on_gpus: for each GPU of this worker those between it and the same of each other worker, by
            NCCL, in the place of `_in_copy`; none where they meet in the hosts' memory.
    """

    _has_nccl: bool
    _in_copy: Collectives
    _across: Collectives | None = None
    _on_gpus: Sequence[Collectives] = ()

    @property
    def _can_meet_on_gpus(self) -> bool:
        """Whether NCCL is there, parts are on GPUs, and all workers share a copy or each has one.

        Groups of some of the workers meet in the hosts' memory.
        """
        is_of_all = self._num_copies == 1 or self._num_sharing == 1
        return self._has_nccl and is_of_all and self._sharding.host is None

    def _gather_over_processes(self, parts: Sequence[tf.Tensor], i: int = 0) -> list[tf.Tensor]:
        collectives = self._on_gpus[i] if self._on_gpus else self._in_copy
        return collectives.all_gather_each(parts)

    def _scatter_over_processes(self, rows: tf.Tensor) -> tf.Tensor:
        own = self._in_copy.reduce_scatter(rows)
        return own if self._across is None else self._across.all_reduce(own)

    def _scattered_among_workers(self, gradients: Sequence) -> list[list[tf.Tensor]]:
        """As the base's; on GPUs each adds up what becomes its own, and no whole meets on one."""
        if not self._on_gpus or self._num_sharing == 1:
            return super()._scattered_among_workers(gradients)
        by_device = []
        for j, collectives in enumerate(self._on_gpus):
            rows = [self._summed_rows(parts, j) for parts in gradients]
            by_device.append(self._in_buckets(collectives.reduce_scatter, rows, j))
        return [list(each) for each in zip(*by_device, strict=True)]

    def _summed_rows(self, parts: Sequence[tf.Tensor], j: int) -> tf.Tensor:
        """On device `j` the sum of all local gradients, of what the devices `j` of workers get.

        Args:
            parts: of one gradient, `[num_shards * length]` on each local device.

        Returns:
            `[num_sharing, length]`.
        """
        cut = []
        for part in parts:
            with tf.device(part.device):
                cut.append(tf.reshape(part, [self._num_sharing, len(self._devices), -1])[:, j])
        with tf.device(self._devices[j]):
            return sum_in_order(cut)

    def _over_workers(self, sums: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """As the base's, between the GPUs that have the same shard."""
        if not self._on_gpus:
            return super()._over_workers(sums)
        by_device = [
            self._in_buckets(self._on_gpus[j].all_reduce, shards, j)
            for j, shards in enumerate(zip(*sums, strict=True))
        ]
        return [list(each) for each in zip(*by_device, strict=True)]

    def _in_buckets(
        self, carry: Callable[[tf.Tensor], tf.Tensor], rows: Sequence[tf.Tensor], j: int
    ) -> list[tf.Tensor]:
        """What `carry` makes of each of `rows`, `[..., length]`, joined along their last axis."""
        sizes = [row.shape.num_elements() * row.dtype.size for row in rows]
        results = list(rows)
        for bucket in plan_buckets(sizes, [row.dtype for row in rows], SENT_BUCKET_BYTES):
            with tf.device(self._devices[j]):
                carried = carry(tf.concat([rows[k] for k in bucket], -1))
                pieces = tf.split(carried, [rows[k].shape[-1] for k in bucket], -1)
            for k, piece in zip(bucket, pieces, strict=True):
                results[k] = piece
        return results
