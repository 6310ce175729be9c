"""Replicated computation over variables that exist once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.data_parallel.mirrored import MirroredLocalExtended
from tfparallel.internals import device_util, layer_of_late_variable, values_util
from tfparallel.replicas.variables import CentralVariable


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
