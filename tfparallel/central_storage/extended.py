"""Which device keeps the variables of a central storage."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import (
    ReduceOp,
    ReductionToOneDevice,
    device_util,
    distribute_lib,
)
from tfparallel.replicas.central import CentralExtended
from tfparallel.replicas.sums_on_devices import is_of_tensors, sums_on_devices
from tfparallel.replicas.variables import CentralVariable


class CentralStorageExtended(CentralExtended):
    """Replicated computation over variables on one device."""

    _places_batches = True

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
        self._seed_device = self._parameter_device

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        is_central = issubclass(variable_class, CentralVariable)
        return (self._parameter_device,) if is_central else self._devices

    def _sum_gradients(self, gradients: list) -> list:
        """Summed where the variables are, which alone need the sum."""

        def merge(_: tf.distribute.Strategy, *gradients: Any) -> list:
            if all(map(is_of_tensors, gradients)):
                return sums_on_devices(gradients, [self._parameter_device])
            pairs = [(gradient, self._parameter_device) for gradient in gradients]
            return ReductionToOneDevice().batch_reduce(ReduceOp.SUM, pairs)

        if self._num_replicas_in_sync == 1:
            return gradients
        return distribute_lib.get_replica_context().merge_call(merge, args=tuple(gradients))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Where the variables live."""
        return (self._parameter_device,)
