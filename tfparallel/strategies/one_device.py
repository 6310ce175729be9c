"""Everything on one device: the reference all other strategies are measured against."""

import tensorflow as tf

from tfparallel.data_parallel.mirrored import MirroredLocalExtended
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import check_devices


class OneDeviceStrategy(KerasStrategy, tf.distribute.OneDeviceStrategy):
    """Places variables and computation on one device.

    Drop-in for `tf.distribute.OneDeviceStrategy`.

    Args:
        device: device name such as `"GPU:0"`.

    Raises:
        ValueError: if the device does not exist.
    """

    def __init__(self, device: str):
        super().__init__(MirroredLocalExtended(self, check_devices(device, "device")))
