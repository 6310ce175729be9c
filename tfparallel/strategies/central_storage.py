"""Data parallel with the variables in one place: replicas read them from there."""

import tensorflow as tf

from tfparallel.central_storage.extended import CentralStorageExtended
from tfparallel.checked_types import checks_types
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import check_device, devices_of_process
from tfparallel.replicas.device_names import Device, Devices
from tfparallel.segments.memory_policy import MemoryPolicy


@checks_types
class CentralStorageStrategy(KerasStrategy, tf.distribute.experimental.CentralStorageStrategy):
    """Variables on one device, computation on all.

    Drop-in for `tf.distribute.experimental.CentralStorageStrategy`. Weights and optimizer slots
    and seeds exist once. What a replica keeps of its own rows (metrics, BatchNorm statistics)
    exists once a replica.

    Args:
        compute_devices: devices that compute; None takes all GPUs, or all logical CPUs.
        parameter_device: where variables live; None takes the only GPU if there is just one,
            else the CPU.
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
        compute_devices: Devices | None = None,
        parameter_device: Device | None = None,
        memory: MemoryPolicy | None = None,
        prefetch_batches: int | None = None,
    ):
        compute_devices = devices_of_process(compute_devices, "compute_devices")
        central = None
        if parameter_device is not None:
            [central] = check_device(parameter_device, "parameter_device")
        extended = CentralStorageExtended(self, compute_devices, central)
        extended._read_ahead(prefetch_batches)
        super().__init__(extended, (memory or MemoryPolicy()).during)
