"""Parameter servers, with workers that share each batch and wait for one another."""

from typing import Any

import tensorflow as tf

from tfparallel.strategies.parameter_server_variables import ParameterServerExtended
from tfparallel.tf_internals import DistributedValues, ReductionToOneDevice


class SyncParameterServerExtended(ParameterServerExtended):
    """Every device of every worker is a replica, and all share each batch."""

    def _compute_devices(self) -> tuple[str, ...]:
        return tuple(device for worker in self._cluster.worker_devices() for device in worker)

    def _local_reduction(self) -> tf.distribute.CrossDeviceOps:
        return ReductionToOneDevice()  # collectives do not reach the devices of other processes

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        if not isinstance(value, DistributedValues):
            return value
        return ReductionToOneDevice()._gather(value, destinations=destinations, axis=axis)
