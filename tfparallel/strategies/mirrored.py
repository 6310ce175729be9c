"""Data parallel on the devices of one process: every device holds all variables."""

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.data_parallel.mirrored import MirroredLocalExtended
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import devices_of_process
from tfparallel.replicas.device_names import Devices
from tfparallel.segments.memory_policy import MemoryPolicy


@checks_types
class MirroredStrategy(KerasStrategy, tf.distribute.MirroredStrategy):
    """Synchronous data parallelism on several devices of one machine.

    Drop-in for `tf.distribute.MirroredStrategy`.

    Args:
        devices: device names such as `["GPU:0", "GPU:1"]`, or how many; None takes all GPUs, or all
            logical CPUs where there are none.
        cross_device_ops: a `tf.distribute.CrossDeviceOps` that sums gradients. None takes NCCL
            for several physical GPUs, and a sum on the first device otherwise.
        memory: which activations are computed again in the backward pass, a
            `tfparallel.MemoryPolicy`; None keeps all but those of layers made in a
            `keras.RematScope`.
        prefetch_batches: how many batches are read and copied to the devices before their steps
            begin; a step on a GPU would wait for its copy otherwise. None: 2 on GPUs, else 0.

    Raises:
        ValueError: for devices that do not exist or are named twice.
    """

    def __init__(
        self,
        devices: Devices | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
        memory: MemoryPolicy | None = None,
        prefetch_batches: int | None = None,
    ):
        extended = MirroredLocalExtended(self, devices_of_process(devices), cross_device_ops)
        extended._read_ahead(prefetch_batches)
        super().__init__(extended, (memory or MemoryPolicy()).during)
