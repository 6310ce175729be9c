"""All-reduce of CPU workers through our own ring."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.communication.bucketed_all_reduce import BucketedAllReduce
from tfparallel.communication.joining import join, split
from tfparallel.communication.link_journal import COLLECTIVE, LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.communication.ring import Ring
from tfparallel.internals import CollectiveAllReduce, ReduceOp, ResourceVariable


class RingAllReduce(BucketedAllReduce):
    """`BucketedAllReduce` through a `Ring`.

    Args:
        ring: connected; all that is reduced here goes through it.
        order: keeps calls in the program's order; one for all that call this ring.
        **options: as `BucketedAllReduce`.
    """

    def __init__(self, ring: Ring, order: ResourceVariable, **options: Any):
        super().__init__(**options)
        self._ring, self._order = ring, order
        self._sums_s = 0.0  # that went through the ring for `_all_reduce_per_replica_values`

    @property
    def times(self) -> LinkTimes:
        """What the ring's collectives have taken so far, and what of it this one's steps hid."""
        return self._ring.times._replace(hidden_s=self._sums_s - self.exposed_s)

    def journal(self) -> AbstractContextManager[LinkJournal]:
        """Within it, what the ring sends and receives is noted."""
        return self._ring.journal()

    def _all_reduce_per_replica_values(
        self, reduce_op: ReduceOp, per_replica_values: Sequence, options: object
    ) -> list:
        if tf.compat.v1.executing_eagerly_outside_functions():
            return super()._all_reduce_per_replica_values(reduce_op, per_replica_values, options)
        # A session's graph knows no `order`.
        return CollectiveAllReduce._all_reduce_per_replica_values(
            self, reduce_op, per_replica_values, options
        )

    def _sum_bucket(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        packed = join(tensors)
        total = self._call_ring(self._timed(self._ring.all_reduce), packed, packed.shape)
        parts = split(total, [tf.shape(tensor) for tensor in tensors])
        return [
            tf.ensure_shape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
        ]

    def _timed(self, collective: Callable) -> Callable:
        def timed(*arrays: np.ndarray) -> object:
            before_s = self._ring.times.spent_s
            result = collective(*arrays)
            self._sums_s += self._ring.times.spent_s - before_s
            return result

        return timed

    def _gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        return self._call_ring(self._ring.all_gather, rows, [None, *rows.shape[1:]])

    def gather_rows(self, rows: tf.Tensor, unordered: tf.Tensor | None = None) -> tf.Tensor:
        """As `LeftOutIfUnread.gather_rows`."""
        shape = [None, *rows.shape[1:]]
        return self._call_ring(self._ring.all_gather, rows, shape, unordered)

    def _gather_summed(self, rows: tf.Tensor) -> tf.Tensor:
        return self._call_ring(self._timed(self._ring.all_gather), rows, [None, *rows.shape[1:]])

    @property
    def order(self) -> ResourceVariable:
        """What keeps calls in the program's order."""
        return self._order

    def sum_of(self, tensor: tf.Tensor, unordered: tf.Tensor | None = None) -> tf.Tensor:
        """As `LeftOutIfUnread.sum_of`."""
        return self._call_ring(self._ring.all_reduce, tensor, tensor.shape, unordered)

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """This worker's row of the sum of all workers' `[num_workers, length]`."""
        return self._call_ring(self._ring.reduce_scatter, rows, [rows.shape[1]])

    def gather_each(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Of each `[length]` all workers', one after the other, in one collective."""

        def gathered(*arrays: np.ndarray) -> list[np.ndarray]:
            return self._ring.all_gather_each(arrays)

        # Eagerly, `numpy_function` gives a list of one result without the list.
        wholes = tf.nest.flatten(self._in_order(gathered, parts, [p.dtype for p in parts]))
        for whole, part in zip(wholes, parts, strict=True):
            whole.set_shape([part.shape[0] * self._ring.num_workers])
        return wholes

    def _call_ring(
        self,
        collective: Callable,
        tensor: tf.Tensor,
        shape: tf.TensorShape,
        unordered: tf.Tensor | None = None,
    ) -> tf.Tensor:
        if unordered is None:
            result = self._in_order(collective, [tensor], tensor.dtype)
        else:
            result = tf.numpy_function(
                lambda array, _: collective(array),
                [tensor, unordered],
                tensor.dtype,
                stateful=False,
                name=COLLECTIVE,
            )
        result.set_shape(shape)
        return result

    def _in_order(
        self,
        collective: Callable,
        tensors: Sequence[tf.Tensor],
        dtypes: tf.DType | Sequence[tf.DType],
    ) -> Any:
        # Calls must have the same order on all workers. TensorFlow keeps operations on one resource
        # in the program's order, also across `tf.cond` and `tf.while_loop`.
        with tf.control_dependencies([self._order.assign_add(1.0)]):
            results = tf.numpy_function(collective, list(tensors), dtypes, name=COLLECTIVE)
        with tf.control_dependencies(tf.nest.flatten(results)):
            self._order.assign_add(1.0)
        return results
