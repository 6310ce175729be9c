"""Parameter servers, with workers that share each batch and wait for one another."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfparallel.parameter_server.cluster import ParameterServerCluster, Timeouts
from tfparallel.parameter_server.recovery import Recovery
from tfparallel.servers.probe import task_names
from tfparallel.servers.watch import Watch
from tfparallel.strategies.parameter_server_variables import ParameterServerExtended
from tfparallel.tf_internals import (
    DistributedValues,
    ReductionToOneDevice,
    TrainerCall,
    surround_epochs,
)


class SyncParameterServerExtended(ParameterServerExtended):
    """Every device of every worker is a replica, and all share each batch."""

    def __init__(
        self,
        container_strategy: Any,
        cluster: ParameterServerCluster,
        partitioner: Callable | None,
        timeouts: Timeouts,
    ):
        super().__init__(container_strategy, cluster, partitioner)
        self._recovery = Recovery(cluster, timeouts)
        addresses = task_names(cluster.tasks, "ps", "worker")
        if str(addresses) not in _watches:
            _watches[str(addresses)] = Watch(addresses, timeouts.ps_s, lambda: bool(_epochs))

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Any:
        surround_epochs(call, self._watched)
        return super()._keras_dataset(dataset, call)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Within it, a task that is silent or gone ends what waits for it, with its name."""
        epoch = object()
        _epochs.add(epoch)
        try:
            with self._recovery.of_all():
                yield
        finally:
            _epochs.discard(epoch)

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


_watches: dict[str, Watch] = {}  # of this process, by what they watch
_epochs: set[object] = set()  # under way; asynchronous ones can do without a silent worker
