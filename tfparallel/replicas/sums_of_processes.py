"""Tensors of several processes meet, through the collectives between their hosts."""

from collections.abc import Callable

import tensorflow as tf

from tfparallel.communication.collectives import Collectives
from tfparallel.communication.joining import join, split
from tfparallel.replicas.batch import OfRows


class SumsOfProcesses:
    """Mixin: what is made of `_collectives`, where there are several processes."""

    _num_workers: int
    _id_in_cluster: int
    _collectives: Collectives

    def _host_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of all workers' tensors of one shape; called in a cross-replica context."""
        return self._collectives.all_reduce(tensor)

    def _host_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """All workers' tensors, `[rows, ...]`, one after the other; called in a `tf.function`."""
        return self._collectives.all_gather(rows)

    def _host_scatter_sum(self, rows: tf.Tensor) -> tf.Tensor:
        """This worker's row of the sum of all workers' `[num_workers, length]`."""
        return self._collectives.reduce_scatter(rows)

    def _sum_where_gradients_meet(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `_host_sum`, on the devices where those can."""
        return self._host_sum(tensor)

    def _sum_list_across_workers(self, tensors: list) -> list:
        """Sums of the workers' tensors, in one all-reduce for each dtype."""
        return self._sum_joined(tensors, self._sum_where_gradients_meet)

    def _sum_list_between_hosts(self, tensors: list) -> list:
        """The same through the hosts: of what is large, or made small on its way."""
        return self._sum_joined(tensors, self._host_sum)

    def _sum_joined(self, tensors: list, add_up: Callable[[tf.Tensor], tf.Tensor]) -> list:
        if self._num_workers == 1:
            return tensors
        sums: list = [None] * len(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            chosen = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            with tf.device(tensors[chosen[0]].device):  # what is on a GPU leaves it as one
                joined = join([tensors[i] for i in chosen])
            total = add_up(joined)
            own = split(total, [tf.shape(tensors[i]) for i in chosen])
            for i, part in zip(chosen, own, strict=True):
                sums[i] = part
        return sums

    def _gather_rows(self, rows: OfRows) -> object:
        if self._num_workers == 1:
            return rows
        if isinstance(rows, (tf.RaggedTensor, tf.SparseTensor)):
            raise NotImplementedError(
                "predict over several workers gathers dense tensors. Received: "
                f"{type(rows).__name__}. Predict in one process, or return `to_tensor()`."
            )
        if tf.executing_eagerly():
            return tf.function(self._gather_rows)(rows)
        scalar = rows.shape.rank == 0
        return self._host_gather(rows[tf.newaxis] if scalar else rows)

    def _scattered_sum(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        if self._num_workers == 1:
            return rows
        # Rows that follow a worker's own fill up what it gets to the length of the longest.
        longest, starts = tf.reduce_max(counts), tf.cumsum(counts, exclusive=True)
        padded = tf.concat([rows, tf.zeros_like(rows[:longest])], 0)
        parts = [padded[starts[i] : starts[i] + longest] for i in range(self._num_workers)]
        own = self._host_scatter_sum(tf.stack([tf.reshape(part, [-1]) for part in parts]))
        own = tf.reshape(own, tf.shape(parts[0]))
        return own[: counts[self._id_in_cluster]]
