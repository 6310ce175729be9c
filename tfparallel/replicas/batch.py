"""The rows of a batch that each replica computes on, and their share of all rows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfparallel.internals import PerReplica, distribute_utils
from tfparallel.internals.distribute import first_replica_of_process, num_replicas_of
from tfparallel.replicas.local_replicas import LocalReplicas

# A number of rows: an int where it is known when tracing, else a scalar int32 tensor.
Rows: TypeAlias = int | tf.Tensor
# What can be cut by rows.
OfRows: TypeAlias = tf.Tensor | tf.RaggedTensor | tf.SparseTensor


@dataclass(frozen=True)
class OnHost:
    """A batch as a host has it that cuts it for replicas of its own.

    Attributes:
        device: of the host, where it is cut.
        replicas: numbers of the host's replicas, a contiguous range.
        data: nest of tensors `[rows, ...]`: all rows; with `total`, those of `replicas` alone.
        total: how many rows all replicas have together, where `data` does not tell.
        finish: makes what a replica computes on of its part of `data`.
    """

    device: str
    replicas: range
    data: Any
    total: Rows | None = None
    finish: Callable[[Any], Any] = lambda part: part

    def cut(self, num_replicas: int) -> tuple[list, list, Rows]:
        """The parts of `replicas`, the rows of each, and the rows of all `num_replicas`."""
        data = keras.tree.map_structure(_as_tensor, self.data)
        total = num_rows(data) if self.total is None else self.total
        if isinstance(total, int) and total < num_replicas:  # some replicas get none
            data = keras.tree.map_structure(_hide_num_rows, data)
            total = num_rows(data) if self.total is None else tf.convert_to_tensor(total)
        bounds = split_rows(total, num_replicas, self.replicas)
        before = 0 if self.total is None else bounds[0][0]
        parts = [
            keras.tree.map_structure(
                lambda leaf, s=start, e=end: _slice_rows(leaf, s - before, e - before), data
            )
            for start, end in bounds
        ]
        return [self.finish(part) for part in parts], [end - start for start, end in bounds], total

    def whole(self) -> object:
        """The batch, where this host has all replicas."""
        with tf.device(self.device):
            return self.finish(self.data)


class OnHosts(tuple[OnHost, ...]):
    """A batch that each of several hosts has, in the order of their replicas."""


class InPlace:
    """A batch whose parts are on the devices of this process's replicas already.

    Attributes:
        parts: a nest of tensors `[rows, ...]` for each replica, cut as `OnHost` cuts.
        total: the rows of all replicas, on the host.
    """

    parts: list
    total: Rows


class Batch:
    """A batch as Keras hands it to `Strategy.run`, cut into the rows of this worker's replicas.

    Args:
        extended: `strategy.extended` of the strategy that runs the step.
        data: nest of tensors `[rows, ...]`, the whole global batch (Keras's own input path and
            `*_on_batch`), or nest of `PerReplica` (a dataset that is distributed already), or
            `OnHosts`, or `InPlace`.

    Attributes:
        parts: one nest for each local replica.
        rows: the number of rows of each part.
        weights: for each part a scalar float64, its rows over the rows of all replicas.
        total: the rows of all replicas.
        first_rows: where each part begins among the rows of all replicas, or None: if they are
            distributed already, that is not known.
    """

    def __init__(self, extended: LocalReplicas, data: object):
        num_local = len(extended.worker_devices)
        self.parts: list = []
        self.rows: list[Rows] = []
        self.weights: list[tf.Tensor] = []
        self.first_rows: list[Rows | None] = []
        if any(isinstance(leaf, PerReplica) for leaf in keras.tree.flatten(data)):
            with tf.device(extended._host_device):
                parts = [distribute_utils.select_replica(i, data) for i in range(num_local)]
                rows = [num_rows(part) for part in parts]
                total = tf.add_n([tf.cast(n, tf.int32) for n in rows])
                self._append(parts, rows, extended._sum_across_workers(total))
            self.first_rows = [None] * num_local
            return
        if isinstance(data, InPlace):
            first = first_replica_of_process(extended)
            own = range(first, first + num_local)
            with tf.device(extended._host_device):
                bounds = split_rows(data.total, num_replicas_of(extended), own)
                self._append(data.parts, [end - start for start, end in bounds], data.total)
            self.first_rows = [start for start, _ in bounds]
            return
        if not isinstance(data, OnHosts):
            first = first_replica_of_process(extended)
            data = [OnHost(extended._host_device, range(first, first + num_local), data)]
        for on_host in data:
            with tf.device(on_host.device):
                parts, rows, total = on_host.cut(num_replicas_of(extended))
                self._append(parts, rows, total)
                bounds = split_rows(total, num_replicas_of(extended), on_host.replicas)
                self.first_rows += [start for start, _ in bounds]

    def _append(self, parts: list, rows: list, total: Rows) -> None:
        self.total = total
        all_rows = tf.cast(total, tf.float64)
        self.parts += parts
        self.rows += rows
        self.weights += [tf.math.divide_no_nan(tf.cast(n, tf.float64), all_rows) for n in rows]


def split_rows(num_rows: Rows, num_replicas: int, replicas: Iterable[int]) -> list[tuple]:
    """`(start, end)` of the contiguous rows of each of `replicas`, as even as possible.

    The first `num_rows % num_replicas` replicas get one row more than the others.
    """
    quotient, remainder = num_rows // num_replicas, num_rows % num_replicas
    minimum = min if isinstance(num_rows, int) else tf.minimum

    def start(replica: int) -> Rows:
        return quotient * replica + minimum(replica, remainder)

    return [(start(replica), start(replica + 1)) for replica in replicas]


def concat_rows(parts: Sequence) -> OfRows:
    """The rows of all `parts` (dense, ragged or sparse tensors) in order; scalars stacked."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    if not isinstance(parts[0], tf.RaggedTensor) and parts[0].shape.rank == 0:
        return tf.stack(parts)
    return tf.concat(parts, axis=0)


def _as_tensor(leaf: object) -> OfRows | None:
    if leaf is None or tf.is_tensor(leaf):  # true of ragged and sparse tensors
        return leaf
    return tf.convert_to_tensor(leaf)


def _hide_num_rows(leaf: OfRows | None) -> OfRows | None:
    """`leaf` with rows unknown when tracing, where replicas must trace alike for different rows.

    Keras returns a loss of static shape [0] unreduced, and TensorFlow leaves out ops for static
    shapes, among them collectives in the backward pass: one replica would have more than another.
    """
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (0, None) or tf.executing_eagerly():
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])


def num_rows(data: object) -> Rows:
    """The number of rows of a nest of tensors `[rows, ...]`."""
    for leaf in keras.tree.flatten(data):
        if leaf is None or leaf.shape.rank == 0:
            continue
        if leaf.shape[0] is not None:
            return int(leaf.shape[0])
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int32)
        if isinstance(leaf, tf.SparseTensor):
            return tf.cast(leaf.dense_shape[0], tf.int32)
        return tf.shape(leaf)[0]
    raise ValueError(
        "A batch needs at least one tensor with rows to split over replicas. "
        f"Received: {keras.tree.map_structure(lambda leaf: getattr(leaf, 'shape', leaf), data)}"
    )


def _slice_rows(leaf: OfRows | None, start: Rows, end: Rows) -> OfRows | None:
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:end]
    begin = tf.concat([[start], tf.zeros([tf.rank(leaf) - 1], tf.int32)], 0)
    size = tf.concat([[tf.cast(end - start, tf.int64)], leaf.dense_shape[1:]], 0)
    rows = tf.sparse.slice(leaf, tf.cast(begin, tf.int64), size)
    rows.set_shape([None, *leaf.shape[1:]])  # a layer that is not built yet needs its columns
    return rows
