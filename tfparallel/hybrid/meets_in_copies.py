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
    """

    _in_copy: Collectives
    _across: Collectives | None = None

    def _host_gather_parts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._in_copy.all_gather_each(parts)

    def _host_reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        own = self._in_copy.reduce_scatter(rows)
        return own if self._across is None else self._across.all_reduce(own)
