"""TensorFlow's `CrossDeviceOps` over a transport of our own: what a strategy reduces with."""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES, plan_buckets
from tfparallel.communication.exposed_wait import ExposedWait
from tfparallel.internals import (
    CollectiveAllReduce,
    DistributedValues,
    Mirrored,
    ReduceOp,
    distribute_utils,
)
from tfparallel.internals.ordered_sums import sum_in_order


class BucketedAllReduce(CollectiveAllReduce):
    """All-reduces dense tensors in buckets, and sparse gradients by gathering their rows.

    Args:
        device: of this worker, where the transport is called.
        bucket_bytes: of dense tensors that are reduced together.
        **collective_options: as `CollectiveAllReduce`, which does all else.
    """

    def __init__(
        self, device: str, bucket_bytes: int = SENT_BUCKET_BYTES, **collective_options: object
    ):
        super().__init__(**collective_options)
        self._device, self._bucket_bytes = device, bucket_bytes
        self._exposed = ExposedWait(device)

    @property
    def exposed_s(self) -> float:
        """For how long steps have waited for sums when all that is summed was there; of CPUs."""
        return self._exposed.seconds

    # ---- the transport ---------------------------------------------------------------------------

    def _sum_bucket(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over workers of tensors of one dtype, together."""
        raise NotImplementedError

    def _gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """All workers' tensors, `[rows, ...]`, in the order of ranks."""
        raise NotImplementedError

    def _gather_summed(self, rows: tf.Tensor) -> tf.Tensor:
        """The same, of a sum in rows: its time is within that of the sums."""
        return self._gather_rows(rows)

    # ---- what is done with it --------------------------------------------------------------------

    def _all_reduce_per_replica_values(
        self, reduce_op: ReduceOp, per_replica_values: Sequence, options: object
    ) -> list:
        results: list = [None] * len(per_replica_values)
        sparse = [is_sparse(value) for value in per_replica_values]
        # Reversed: gradients of the last layers are ready first.
        dense = [i for i, chosen in enumerate(sparse) if not chosen][::-1]
        began = self._exposed.begin(
            _tensors_of(part for v in per_replica_values for part in v.values)
        )
        with tf.device(self._device):
            totals = self._reduce_dense([per_replica_values[i] for i in dense], options)
            for i in [i for i, chosen in enumerate(sparse) if chosen]:
                results[i] = self._gather_rows_of_gradient(per_replica_values[i])
        for i, total in zip(dense, totals, strict=True):
            results[i] = total
        self._exposed.end(began, _tensors_of(results))
        return [self._on_all_devices(reduce_op, result) for result in results]

    def _reduce_dense(self, per_replica_values: list, options: object) -> list[tf.Tensor]:
        """Sums over replicas, bucket by bucket."""
        local = [sum_in_order(value.values) for value in per_replica_values]
        buckets = plan_buckets(
            [_size_bytes(tensor) for tensor in local],
            [tensor.dtype for tensor in local],
            self._options.merge(options).bytes_per_pack or self._bucket_bytes,
        )
        totals: list = [None] * len(local)
        for bucket in buckets:
            tensors = [local[i] for i in bucket]
            for i, total in zip(bucket, self._sum_bucket(tensors), strict=True):
                totals[i] = total
        return totals

    def _gather_rows_of_gradient(self, value: tf.distribute.DistributedValues) -> tf.IndexedSlices:
        """The sum over replicas of a sparse gradient: the rows of all, equal indices not merged."""
        values = tf.concat([part.values for part in value.values], 0)
        indices = tf.concat([part.indices for part in value.values], 0)
        return tf.IndexedSlices(
            self._gather_summed(values),
            self._gather_summed(indices),
            value.values[0].dense_shape,
        )

    def _batch_all_gather(self, per_replica_values: list, axis: int, options: object) -> list:
        del options
        with tf.device(self._device):
            gathered = [
                self._gather_along(tf.concat(value.values, axis), axis)
                for value in per_replica_values
            ]
        return [self._on_all_devices(ReduceOp.SUM, each) for each in gathered]

    def _gather_along(self, tensor: tf.Tensor, axis: int) -> tf.Tensor:
        if axis == 0:
            return self._gather_rows(tensor)
        order = list(range(tensor.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        return tf.transpose(self._gather_rows(tf.transpose(tensor, order)), order)

    def _on_all_devices(self, reduce_op: ReduceOp, total: object) -> object:
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(self._copy(reduce_op, total))
        return distribute_utils.regroup(tuple(copies), wrap_class=Mirrored)

    def _copy(self, reduce_op: ReduceOp, total: object) -> object:
        if isinstance(total, tf.IndexedSlices):
            values = self._copy(reduce_op, total.values)
            return tf.IndexedSlices(values, tf.identity(total.indices), total.dense_shape)
        return total / self._group_size if reduce_op == ReduceOp.MEAN else tf.identity(total)


def is_sparse(value: object) -> bool:
    """Whether a value, of one replica or `PerReplica`, is a sparse gradient."""
    parts = value.values if isinstance(value, DistributedValues) else [value]
    return any(isinstance(part, tf.IndexedSlices) for part in parts)


def _tensors_of(values: Iterable[object]) -> list[tf.Tensor]:
    return [each.values if isinstance(each, tf.IndexedSlices) else each for each in values]


def _size_bytes(tensor: tf.Tensor) -> int | None:
    num_elements = tensor.shape.num_elements()
    return None if num_elements is None else num_elements * tensor.dtype.size
