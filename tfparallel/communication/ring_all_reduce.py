"""The ring as TensorFlow's `CrossDeviceOps`: what a strategy reduces its gradients with."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.communication.bucketing import plan_buckets
from tfparallel.communication.ring import Ring
from tfparallel.tf_internals import (
    CollectiveAllReduce,
    DistributedValues,
    Mirrored,
    ReduceOp,
    ResourceVariable,
    distribute_utils,
)

# Large enough to reach the network's bandwidth, small enough that the first is under way while
# later gradients are being computed.
BUCKET_BYTES = 8 << 20


class RingAllReduce(CollectiveAllReduce):
    """All-reduces tensors and sparse gradients through a `Ring`; gathers as TensorFlow does.

    Args:
        ring: connected; all that is reduced here goes through it.
        host_device: the CPU device of this worker that calls the ring.
        **collective_options: as `CollectiveAllReduce`.
    """

    def __init__(self, ring: Ring, host_device: str, **collective_options: Any):
        super().__init__(**collective_options)
        self._ring, self._host_device = ring, host_device
        with tf.init_scope():
            # Not `tf.Variable`: under a strategy's scope it would be replicated.
            self._order = ResourceVariable(0.0)

    def _all_reduce_per_replica_values(
        self, reduce_op: ReduceOp, per_replica_values: Sequence, options: Any
    ) -> list:
        results: list = [None] * len(per_replica_values)
        sparse = [is_sparse(value) for value in per_replica_values]
        # Reversed: gradients of the last layers are ready first.
        dense = [i for i, chosen in enumerate(sparse) if not chosen][::-1]
        with tf.device(self._host_device):
            totals = self._reduce_dense([per_replica_values[i] for i in dense], options)
            for i in [i for i, chosen in enumerate(sparse) if chosen]:
                results[i] = self._gather_rows_of_gradient(per_replica_values[i])
        for i, total in zip(dense, totals, strict=True):
            results[i] = total
        return [self._on_all_devices(reduce_op, result) for result in results]

    def _reduce_dense(self, per_replica_values: list, options: Any) -> list[tf.Tensor]:
        """Sums over replicas, bucket by bucket."""
        local = [tf.add_n(list(value.values)) for value in per_replica_values]
        buckets = plan_buckets(
            [_size_bytes(tensor) for tensor in local],
            [tensor.dtype for tensor in local],
            self._options.merge(options).bytes_per_pack or BUCKET_BYTES,
        )
        totals: list = [None] * len(local)
        for bucket in buckets:
            tensors = [local[i] for i in bucket]
            for i, total in zip(bucket, self._reduce_bucket(tensors), strict=True):
                totals[i] = total
        return totals

    def _gather_rows_of_gradient(self, value: Any) -> tf.IndexedSlices:
        """The sum over replicas of a sparse gradient: the rows of all, equal indices not merged."""
        values = tf.concat([part.values for part in value.values], 0)
        indices = tf.concat([part.indices for part in value.values], 0)
        return tf.IndexedSlices(
            self._call_ring(self._ring.all_gather, values, [None, *values.shape[1:]]),
            self._call_ring(self._ring.all_gather, indices, [None]),
            value.values[0].dense_shape,
        )

    def _reduce_bucket(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        packed = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
        total = self._call_ring(self._ring.all_reduce, packed, packed.shape)
        sizes = [tf.size(tensor) for tensor in tensors]
        parts = [total] if len(flat) == 1 else tf.split(total, sizes)
        return [
            tf.ensure_shape(tf.reshape(part, tf.shape(tensor)), tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def _call_ring(self, collective: Callable, tensor: tf.Tensor, shape: Any) -> tf.Tensor:
        # Calls must have the same order on all workers. TensorFlow keeps operations on one resource
        # in the program's order, also across `tf.cond` and `tf.while_loop`.
        with tf.control_dependencies([self._order.assign_add(1.0)]):
            result = tf.numpy_function(collective, [tensor], tensor.dtype)
        with tf.control_dependencies([result]):
            self._order.assign_add(1.0)
        result.set_shape(shape)
        return result

    def _on_all_devices(self, reduce_op: ReduceOp, total: Any) -> Any:
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(self._copy(reduce_op, total))
        return distribute_utils.regroup(tuple(copies), wrap_class=Mirrored)

    def _copy(self, reduce_op: ReduceOp, total: Any) -> Any:
        if isinstance(total, tf.IndexedSlices):
            values = self._copy(reduce_op, total.values)
            return tf.IndexedSlices(values, tf.identity(total.indices), total.dense_shape)
        return total / self._group_size if reduce_op == ReduceOp.MEAN else tf.identity(total)


def is_sparse(value: Any) -> bool:
    """Whether a value, of one replica or `PerReplica`, is a sparse gradient."""
    parts = value.values if isinstance(value, DistributedValues) else [value]
    return any(isinstance(part, tf.IndexedSlices) for part in parts)


def _size_bytes(tensor: tf.Tensor) -> int | None:
    num_elements = tensor.shape.num_elements()
    return None if num_elements is None else num_elements * tensor.dtype.size
