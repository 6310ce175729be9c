"""Replicas on devices of one process, between which nothing has to be matched."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import (
    DistributedValues,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    distribute_lib,
    distribute_utils,
)
from tfparallel.internals.distribute import gather
from tfparallel.replicas.batch import concat_rows
from tfparallel.replicas.extended import ReplicatedExtended


class LocalExtended(ReplicatedExtended):
    """Replicas on devices of one process: reduction is a sum in the graph, no collective to match.

    Collectives (NCCL) are kept for several physical GPUs, and wherever the user passed
    `cross_device_ops`.
    """

    _user_cross_device_ops: tf.distribute.CrossDeviceOps | None = None

    def _local_reduction(self) -> tf.distribute.CrossDeviceOps:
        if self._user_cross_device_ops is not None:
            return self._user_cross_device_ops
        if all("gpu" in device.lower() for device in self._devices) and not _has_virtual_gpus():
            return self._collective_ops
        return ReductionToOneDevice()

    def _all_rows(self, tensors: list) -> list:
        """As the base's, gathered on each device from each."""

        def merge(_: tf.distribute.Strategy, *tensors: Any) -> list:
            return [self._copies_of_rows(self._local_results(tensor)) for tensor in tensors]

        return distribute_lib.get_replica_context().merge_call(merge, args=tensors)

    def _copies_of_rows(self, parts: Sequence) -> PerReplica:
        copies = {}
        for device in dict.fromkeys(self._devices):
            with tf.device(device):
                copies[device] = concat_rows(parts)
        return PerReplica([copies[device] for device in self._devices])

    def _reduce_to(self, reduce_op: ReduceOp, value: Any, destinations: Any, options: Any) -> Any:
        if isinstance(value, DistributedValues) and not distribute_utils.is_mirrored(value):
            return ReductionToOneDevice().reduce(reduce_op, value, destinations)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        if not isinstance(value, DistributedValues):
            return value
        return gather(self._local_reduction(), value, destinations, axis, options)

    def _batch_reduce_to(
        self, reduce_op: ReduceOp, value_destination_pairs: list, options: Any
    ) -> list:
        return self._local_reduction().batch_reduce(reduce_op, value_destination_pairs, options)


def _has_virtual_gpus() -> bool:
    return len(tf.config.list_logical_devices("GPU")) > len(tf.config.list_physical_devices("GPU"))
