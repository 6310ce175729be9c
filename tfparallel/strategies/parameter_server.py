"""Variables on parameter servers, computation on workers, one program on the chief."""

import threading
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from tfparallel.cluster import read_tf_config
from tfparallel.parameter_server.cluster import ParameterServerCluster, Timeouts
from tfparallel.parameter_server.placement import BalancedBytes
from tfparallel.parameter_server.security import check_network
from tfparallel.strategies.base import KerasStrategy
from tfparallel.strategies.central_storage import CentralStorageExtended
from tfparallel.strategies.variables import CentralVariable
from tfparallel.tf_internals import DistributedValues, DistributedVariable, ReductionToOneDevice


class ParameterServerStrategy(KerasStrategy):
    """Trains on the workers of a cluster, with the variables on its parameter servers.

    Drop-in for `tf.distribute.ParameterServerStrategy`, under Keras's `fit` too. Every task runs
    the same script. On a worker or a parameter server the constructor serves until the chief is
    done and then ends the process with status 0: what comes after it runs on the chief only.

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` with a chief, workers
            and parameter servers; None reads `TF_CONFIG`.
        variable_partitioner: a `tf.distribute.experimental.partitioners.Partitioner`, or any
            function of shape and dtype that gives the number of parts along each dim; None keeps
            every variable in one piece.
        mode: "async": each worker trains on batches of its own and hands its update in when it is
            done. "sync": all workers share each batch, which equals training on one device.
        max_staleness: "async" only. How many updates may be applied between the moment that a
            worker reads the weights and the moment that its own update is applied; None sets no
            bound.
        insecure_network: says that strangers cannot reach the network between the tasks. Needed
            for addresses other than loopback: TensorFlow's servers know no authentication.
        timeouts: how long tasks wait for one another.

    Raises:
        ClusterConfigError: listing all that is wrong with `TF_CONFIG`.
        ValueError: for a cluster without chief, workers or parameter servers, for addresses that
            other machines reach, and for wrong arguments.
        TimeoutError: on the chief, naming the tasks that never came.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Callable | None = None,
        mode: Literal["async", "sync"] = "async",
        max_staleness: int | None = None,
        insecure_network: bool = False,
        timeouts: Timeouts | None = None,
    ):
        _check_arguments(mode, max_staleness, variable_partitioner)
        if cluster_resolver is None and (config := read_tf_config()) is not None:
            cluster_resolver = config.cluster_resolver()
        cluster = ParameterServerCluster(cluster_resolver)
        check_network(cluster.tasks, insecure_network)
        timeouts = timeouts or Timeouts()
        if cluster.is_server:
            cluster.serve(timeouts)
        cluster.connect(timeouts)
        self._cluster_resolver = cluster_resolver
        if mode == "async":
            raise NotImplementedError('mode="async" is under construction: take mode="sync".')
        super().__init__(SyncParameterServerExtended(self, cluster))

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The cluster resolver of this strategy."""
        return self._cluster_resolver


class ParameterServerExtended(CentralStorageExtended):
    """Central storage whose one place is several servers."""

    def __init__(self, container_strategy: Any, cluster: ParameterServerCluster):
        self._cluster = cluster
        self._placement = BalancedBytes(cluster.num_ps)
        self._place_next = threading.local()
        super().__init__(container_strategy, [cluster.chief_device], cluster.ps_devices[0])

    def _compute_devices(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _initialize_strategy(self, devices: Any) -> None:
        """Takes the workers' devices: TensorFlow's constructor refuses those of several hosts."""
        super()._initialize_strategy(devices)  # the chief's, which also feeds datasets
        self._devices = self._compute_devices()
        host_device = self._cluster.chief_device
        self._input_workers_devices = ((host_device, self._devices),)
        self._default_device = None

    @property
    def _host_device(self) -> str:
        return self._cluster.chief_device

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Where the variables live."""
        return self._cluster.ps_devices

    # ---- where variables live --------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        kwargs["initial_value"] = _evaluated(kwargs.get("initial_value"), kwargs.get("dtype"))
        size_bytes = _size_bytes(kwargs["initial_value"])
        reference = kwargs.get("colocate_with")
        if isinstance(reference, DistributedVariable):  # a slot, next to its weight
            server = self._cluster.ps_devices.index(reference.values[0].device)
            self._placement.add(server, size_bytes)
        else:
            server = self._placement.place(size_bytes)
        self._place_next.device = self._cluster.ps_devices[server]
        return super()._create_variable(next_creator, **kwargs)

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        # What each replica keeps of its own rows is on the servers too: a worker may be lost.
        copies = 1 if issubclass(variable_class, CentralVariable) else len(self._devices)
        return (self._place_next.device,) * copies


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


def _evaluated(initial_value: Any, dtype: Any) -> Any:
    """An initial value as a tensor, where one can be had now: its size decides its place."""
    if not tf.executing_eagerly():
        return initial_value
    value = initial_value() if callable(initial_value) else initial_value
    value = getattr(value, "wrapped_value", value)  # of a checkpoint being restored
    return tf.convert_to_tensor(value, dtype)


def _size_bytes(initial_value: Any) -> int:
    shape, dtype = getattr(initial_value, "shape", None), getattr(initial_value, "dtype", None)
    if shape is None or dtype is None or not shape.is_fully_defined():
        return 0
    return shape.num_elements() * dtype.size


def _check_arguments(mode: str, max_staleness: int | None, partitioner: object) -> None:
    if mode not in ("async", "sync"):
        raise ValueError(f'`mode` must be "async" or "sync". Received: {mode!r}.')
    if max_staleness is not None and mode == "sync":
        raise ValueError(
            'max_staleness is for mode="async": with mode="sync" no update is ever stale. '
            f"Received: max_staleness={max_staleness}."
        )
    if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
        raise ValueError(
            f"max_staleness must be an integer from 0, or None. Received: {max_staleness!r}."
        )
    if partitioner is not None and not callable(partitioner):
        raise ValueError(
            "variable_partitioner must be a function of shape and dtype, or None. Received: "
            f"{partitioner!r}."
        )
