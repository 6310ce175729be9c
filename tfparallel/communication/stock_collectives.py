"""TensorFlow's own collectives, on one device of each place."""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.communication.carried_dtypes import as_words, from_words, moved_by, summed_by
from tfparallel.internals import CollectiveAllReduce, DistributedValues, ReduceOp
from tfparallel.internals.distribute import (
    exchange_rows,
    gather_alike,
    launchers_of,
    reduces_by_nccl,
    scatter_sum_by_nccl,
)

SUMMED = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
GATHERED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


class StockCollectives:
    """`Collectives` of TensorFlow; of dtypes that it does not know, by a cast or by their bits.

    Args:
        operations: of one local device, which a place has.
        device: that device.
        size: how many places there are.
        index: which of them this is.
    """

    def __init__(self, operations: CollectiveAllReduce, device: str, size: int, index: int):
        self._operations, self._device = operations, device
        self.size, self.index = size, index

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_reduce`."""
        return summed_by(self._sum, tensor, SUMMED)

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.reduce_scatter`; without NCCL what is exchanged is added up here."""
        return summed_by(self._scatter_sum, rows, SUMMED)

    def all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_gather`; in a `tf.function` only, as TensorFlow's."""
        gathered = moved_by(self._gather, rows, GATHERED)
        return tf.ensure_shape(gathered, [None, *rows.shape[1:]])

    def all_gather_each(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `Collectives.all_gather_each`."""
        with tf.device(self._device):
            if tf.executing_eagerly():  # TensorFlow gathers in functions only
                return tf.nest.flatten(self._gather_in_function(list(parts)))
            return [moved_by(self._gather_alike, tf.identity(part), GATHERED) for part in parts]

    @functools.cached_property
    def _gather_in_function(self) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
        return tf.function(self.all_gather_each)

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_to_all`."""
        return tf.ensure_shape(moved_by(self._exchange, rows, SUMMED), rows.shape)

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.broadcast`: a sum of bits, with nothing of the other places."""
        words = as_words(tensor)
        total = self._sum(words if self.index == 0 else tf.zeros_like(words))
        return tf.ensure_shape(from_words(total, tensor.dtype), tensor.shape)

    def _sum(self, tensor: tf.Tensor) -> tf.Tensor:
        if _is_empty(tensor):
            return tensor
        with tf.device(self._device):
            tensor = tf.identity(tensor)
            reduced = self._operations.reduce(ReduceOp.SUM, tensor, self._device)
        return first_of(reduced)

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        with tf.device(self._device):
            return launchers_of(self._operations)[0].all_gather(rows, axis=0)

    def _gather_alike(self, part: tf.Tensor) -> tf.Tensor:
        if _is_empty(part):
            return part
        flat = tf.reshape(part, [-1])  # words of a wide number are two
        gathered = gather_alike(launchers_of(self._operations)[0], flat)
        return tf.reshape(gathered, [-1, *part.shape[1:]])

    def _scatter_sum(self, rows: tf.Tensor) -> tf.Tensor:
        launcher = launchers_of(self._operations)[0]
        if _is_empty(rows) or not reduces_by_nccl(launcher):
            return tf.reduce_sum(self._exchange(rows), 0)
        with tf.device(self._device):
            return scatter_sum_by_nccl(launcher, tf.identity(rows))

    def _exchange(self, rows: tf.Tensor) -> tf.Tensor:
        if _is_empty(rows):
            return rows
        with tf.device(self._device):
            return exchange_rows(launchers_of(self._operations)[0], tf.identity(rows))


def _is_empty(tensor: tf.Tensor) -> bool:
    """Whether nothing is sent, as all places know: TensorFlow 2.21 ends the process over it."""
    return tensor.shape.num_elements() == 0


def first_of(value: object) -> tf.Tensor:
    """What the first local device has of a value that may be distributed."""
    return value.values[0] if isinstance(value, DistributedValues) else value
