"""The collectives of our ring, of CPUs."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.communication.ring_all_reduce import RingAllReduce
from tfparallel.communication.stock_collectives import first_of
from tfparallel.internals import ReduceOp


class RingCollectives:
    """`Collectives` through a ring; what it has no way of its own for is picked from a gather.

    Args:
        reduction: whose ring it is.
        device: of this worker, where the ring is called.
        size: how many workers there are.
        index: which of them this is.
    """

    def __init__(self, reduction: RingAllReduce, device: str, size: int, index: int):
        self._reduction, self._device = reduction, device
        self.size, self.index = size, index

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_reduce`."""
        with tf.device(self._device):
            reduced = self._reduction.reduce(ReduceOp.SUM, tf.identity(tensor), self._device)
        return first_of(reduced)

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.reduce_scatter`."""
        with tf.device(self._device):
            return self._reduction.reduce_scatter(rows)

    def all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_gather`."""
        with tf.device(self._device):
            return self._reduction.gather_rows(rows)

    def all_gather_each(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `Collectives.all_gather_each`."""
        with tf.device(self._device):
            return self._reduction.gather_each(parts)

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_to_all`; all rows go around, `size` times what would have to."""
        gathered = self.all_gather(rows[tf.newaxis])
        return tf.ensure_shape(gathered[:, self.index], rows.shape)

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.broadcast`."""
        own = tensor[tf.newaxis][: 1 if self.index == 0 else 0]
        return tf.ensure_shape(self.all_gather(own)[0], tensor.shape)
