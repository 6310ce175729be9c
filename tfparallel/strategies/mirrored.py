"""Data parallel on the devices of one process: every device holds all variables."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.data_parallel.mirrored import MirroredLocalExtended
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import check_devices


class MirroredStrategy(KerasStrategy, tf.distribute.MirroredStrategy):
    """Synchronous data parallelism on several devices of one machine.

    Drop-in for `tf.distribute.MirroredStrategy`.

    Args:
        devices: device names such as `["GPU:0", "GPU:1"]`; None takes all GPUs, or all logical
            CPUs where there are none.
        cross_device_ops: a `tf.distribute.CrossDeviceOps` that sums gradients. None takes NCCL
            for several physical GPUs, and a sum on the first device otherwise.

    Raises:
        ValueError: for devices that do not exist or are named twice.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
    ):
        devices = check_devices(devices)
        super().__init__(MirroredLocalExtended(self, devices, cross_device_ops))
