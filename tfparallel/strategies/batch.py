"""The rows of a batch that each replica computes on, and their share of all rows."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.tf_internals import PerReplica, distribute_utils

Rows = Any  # a number of rows: an int where it is known when tracing, else a scalar int32 tensor


class Batch:
    """A batch as Keras hands it to `Strategy.run`, cut into the rows of this worker's replicas.

    Args:
        extended: `strategy.extended` of the strategy that runs the step.
        data: nest of tensors `[rows, ...]`, the whole global batch (Keras's own input path and
            `*_on_batch`), or nest of `PerReplica` (a dataset that is distributed already).

    Attributes:
        parts: one nest for each local replica.
        rows: the number of rows of each part.
        weights: for each part a scalar float32, its rows over the rows of all replicas.
    """

    def __init__(self, extended: Any, data: Any):
        num_local = len(extended.worker_devices)
        with tf.device(extended._host_device):
            if any(isinstance(leaf, PerReplica) for leaf in keras.tree.flatten(data)):
                self.parts = [distribute_utils.select_replica(i, data) for i in range(num_local)]
                self.rows = [num_rows(part) for part in self.parts]
                total = tf.add_n([tf.cast(n, tf.int32) for n in self.rows])
                total = extended._sum_across_workers(total)
            else:
                first = extended._get_replica_id_in_sync_group(0)
                replicas = range(first, first + num_local)
                num_replicas = extended._num_replicas_in_sync
                data = keras.tree.map_structure(_as_tensor, data)
                if _some_get_none(data, num_replicas):
                    data = keras.tree.map_structure(_hide_num_rows, data)
                self.parts, self.rows, total = _split(data, num_replicas, replicas)
            total = tf.cast(total, tf.float32)
            self.weights = [tf.math.divide_no_nan(tf.cast(n, tf.float32), total) for n in self.rows]


def split_rows(num_rows: Rows, num_replicas: int, replicas: Iterable[int]) -> list[tuple]:
    """`(start, end)` of the contiguous rows of each of `replicas`, as even as possible.

    The first `num_rows % num_replicas` replicas get one row more than the others.
    """
    quotient, remainder = num_rows // num_replicas, num_rows % num_replicas
    minimum = min if isinstance(num_rows, int) else tf.minimum

    def start(replica: int) -> Rows:
        return quotient * replica + minimum(replica, remainder)

    return [(start(replica), start(replica + 1)) for replica in replicas]


def concat_rows(parts: Sequence) -> Any:
    """The rows of all `parts` (dense, ragged or sparse tensors) in order; scalars stacked."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    if not isinstance(parts[0], tf.RaggedTensor) and parts[0].shape.rank == 0:
        return tf.stack(parts)
    return tf.concat(parts, axis=0)


def _split(data: Any, num_replicas: int, replicas: Iterable[int]) -> tuple[list, list, Rows]:
    """The parts of `replicas`, the rows of each, and the rows of all."""
    total = num_rows(data)
    bounds = split_rows(total, num_replicas, replicas)
    parts = [
        keras.tree.map_structure(lambda leaf, s=start, e=end: _slice_rows(leaf, s, e), data)
        for start, end in bounds
    ]
    return parts, [end - start for start, end in bounds], total


def _some_get_none(data: Any, num_replicas: int) -> bool:
    """Whether a batch is known, when tracing, to have fewer rows than replicas."""
    rows = num_rows(data)
    return isinstance(rows, int) and rows < num_replicas


def _as_tensor(leaf: Any) -> Any:
    if leaf is None or tf.is_tensor(leaf):  # true of ragged and sparse tensors
        return leaf
    return tf.convert_to_tensor(leaf)


def _hide_num_rows(leaf: Any) -> Any:
    """`leaf` with rows unknown when tracing, where replicas must trace alike for different rows.

    Keras returns a loss of static shape [0] unreduced, and TensorFlow leaves out ops for static
    shapes, among them collectives in the backward pass: one replica would have more than another.
    """
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (0, None) or tf.executing_eagerly():
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])


def num_rows(data: Any) -> Rows:
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


def _slice_rows(leaf: Any, start: Rows, end: Rows) -> Any:
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:end]
    begin = tf.concat([[start], tf.zeros([tf.rank(leaf) - 1], tf.int32)], 0)
    size = tf.concat([[tf.cast(end - start, tf.int64)], leaf.dense_shape[1:]], 0)
    return tf.sparse.slice(leaf, tf.cast(begin, tf.int64), size)
