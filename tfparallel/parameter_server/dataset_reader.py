"""One worker's copy of a dataset, read by the numbers of epochs and batches."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfparallel.parameter_server.dataset_graph import DatasetGraph


class DatasetReader:
    """A dataset rebuilt on a device, and how far it has been read there.

    Args:
        graph: of the dataset.
        element_spec: of its batches.
        device: a CPU.
        num_taken: how many batches were taken of each epoch, by whoever; grows while this reads.
    """

    def __init__(
        self, graph: DatasetGraph, element_spec: object, device: str, num_taken: Sequence[int]
    ):
        self._graph, self._element_spec = graph, element_spec
        self._device, self._num_taken = device, num_taken
        self._build()

    def _build(self) -> None:
        with tf.device(self._device):
            variant = tf.raw_ops.DatasetFromGraph(graph_def=self._graph.serialized)
            self._dataset = tf.data.experimental.from_variant(variant, self._element_spec)
        self._iterator: Any = None  # of the open epoch
        self._epoch, self._next = -1, 0

    def read(self, epoch: int, number: int) -> object:
        """Batch `number` of `epoch`, a nest of tensors on the device."""
        num_skipped = tf.constant(self._seek(epoch, number))
        with tf.device(self._device):
            return _skip_and_read(self._iterator, num_skipped)

    def iterator_at(self, epoch: int, number: int) -> object:
        """An iterator on the device, for the caller to take batch `number` of `epoch` from."""
        self._skip(self._seek(epoch, number))
        return self._iterator

    def _seek(self, epoch: int, number: int) -> int:
        """Opens the epoch; returns how many of its batches come before, and counts this as read."""
        if (epoch, number) < (self._epoch, self._next):
            self._build()  # a step that is done again: start over
        while self._epoch < epoch:
            if self._iterator is not None and not self._graph.is_left_unread:
                self._leave(self._num_taken[self._epoch])
            self._open(number if self._epoch + 1 == epoch else 0)
        num_skipped, self._next = number - self._next, number + 1
        return num_skipped

    def _leave(self, num_taken: int) -> None:
        """Ends the open epoch as everybody does."""
        if num_taken in (0, self._graph.num_batches):
            self._skip(num_taken - self._next)
        else:  # reading ahead, a worker may have begun any number of iterators: all begin anew
            epoch = self._epoch
            self._build()
            self._epoch = epoch

    def _open(self, num_skipped: int) -> None:
        """Begins the next epoch, with the batch behind so many."""
        count = tf.constant(num_skipped, tf.int64)
        with tf.device(self._device):
            # Passed over when the first batch is read, by all workers at once.
            dataset = self._dataset.skip(count) if num_skipped else self._dataset
            self._iterator = iter(dataset)
        self._epoch, self._next = self._epoch + 1, num_skipped

    def _skip(self, num_batches: int) -> None:
        if num_batches > 0:
            count = tf.constant(num_batches)
            with tf.device(self._device):
                _skip_batches(self._iterator, count)


@tf.function(reduce_retracing=True)
def _skip_batches(iterator: tf.data.Iterator, num_skipped: tf.Tensor) -> None:
    for _ in tf.range(num_skipped):
        iterator.get_next()


@tf.function(reduce_retracing=True)
def _skip_and_read(iterator: tf.data.Iterator, num_skipped: tf.Tensor) -> object:
    for _ in tf.range(num_skipped):
        iterator.get_next()
    return iterator.get_next()
