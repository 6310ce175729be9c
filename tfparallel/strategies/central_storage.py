"""Data parallel with the variables in one place: replicas read them from there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import device_util, layer_of_late_variable, values_util
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import check_devices
from tfparallel.replicas.variables import CentralVariable
from tfparallel.strategies.mirrored import MirroredLocalExtended


class CentralStorageStrategy(KerasStrategy, tf.distribute.experimental.CentralStorageStrategy):
    """Variables on one device, computation on all.

    Drop-in for `tf.distribute.experimental.CentralStorageStrategy`. Weights and optimizer slots
    and seeds exist once. What a replica keeps of its own rows (metrics, BatchNorm statistics)
    exists once a replica.

    Args:
        compute_devices: devices that compute; None takes all GPUs, or all logical CPUs.
        parameter_device: where variables live; None takes the only GPU if there is just one,
            else the CPU.

    Raises:
        ValueError: for devices that do not exist or are named twice.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
    ):
        compute_devices = check_devices(compute_devices, "compute_devices")
        central = check_devices(parameter_device, "parameter_device")
        super().__init__(
            CentralStorageExtended(self, compute_devices, central[0] if central else None)
        )


class CentralStorageExtended(MirroredLocalExtended):
    """Replicated computation over variables that exist once."""

    _replicated_class = CentralVariable

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
    ):
        super().__init__(container_strategy, compute_devices)
        if parameter_device is None:
            gpus = [device for device in self._devices if "GPU" in device]
            parameter_device = gpus[0] if len(gpus) == 1 == len(self._devices) else "/device:CPU:0"
        self._parameter_device = device_util.canonicalize(parameter_device)

    def _variable_class(self, owner: object, kwargs: Mapping[str, Any]) -> type:
        # Statistics need a copy for each replica, also those that are created late.
        return super()._variable_class(owner or layer_of_late_variable(), kwargs)

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        return (self._parameter_device,) if variable_class is CentralVariable else self._devices

    def _replica_ctx_update(
        self, var: Any, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> Any:
        if isinstance(var, CentralVariable) and values_util.get_current_replica_id_as_int() != 0:
            return None  # replica 0 computes the same update, for all
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Where the variables live."""
        return (self._parameter_device,)
