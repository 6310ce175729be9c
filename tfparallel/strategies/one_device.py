"""Everything on one device: the reference all other strategies are measured against."""

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.data_parallel.mirrored import MirroredLocalExtended
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import check_device
from tfparallel.replicas.device_names import Devices
from tfparallel.segments.memory_policy import MemoryPolicy


@checks_types
class OneDeviceStrategy(KerasStrategy, tf.distribute.OneDeviceStrategy):
    """Places variables and computation on one device.

    Drop-in for `tf.distribute.OneDeviceStrategy`.

    Args:
        device: device name such as `"GPU:0"`, or its number.
        memory: which activations are computed again in the backward pass, a
            `tfparallel.MemoryPolicy`; None keeps all but those of layers made in a
            `keras.RematScope`.
        prefetch_batches: how many batches are read and copied to the device before their steps
            begin; a step on a GPU would wait for its copy otherwise. None: 2 on GPUs, else 0.

    Raises:
        ValueError: if the device does not exist, or for several.
    """

    def __init__(
        self,
        device: Devices,
        memory: MemoryPolicy | None = None,
        prefetch_batches: int | None = None,
    ):
        extended = MirroredLocalExtended(self, check_device(device, "device"))
        extended._read_ahead(prefetch_batches)
        super().__init__(extended, (memory or MemoryPolicy()).during)
