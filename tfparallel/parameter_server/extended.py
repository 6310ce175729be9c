"""Where the variables of a parameter server strategy live: on several servers, by bytes."""

import threading
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import (
    DistributedVariable,
    distribute_utils,
    layer_of_late_variable,
    owner_of_new_variable,
    record,
    values_util,
)
from tfparallel.parameter_server.cut import cut_rows, num_parts, rows_of_parts
from tfparallel.parameter_server.embedding_hooks import hook_embedding
from tfparallel.parameter_server.least_loaded import BalancedBytes
from tfparallel.parameter_server.partitioned_variables import (
    CentralPartitionedVariable,
    Partitioned,
    of_part,
)
from tfparallel.parameter_server.server_cluster import ParameterServerCluster
from tfparallel.parameter_server.server_variables import (
    ServerLayerVariable,
    ServerMetric,
    ServerStatistics,
    ServerVariable,
)
from tfparallel.replicas.assigned_once import CentralLayerVariable
from tfparallel.replicas.batch_norm_hooks import hook_batch_norm
from tfparallel.replicas.central import CentralExtended
from tfparallel.replicas.convolution_hooks import hook_convolution
from tfparallel.replicas.device_names import names_of_groups
from tfparallel.replicas.elementwise import is_elementwise
from tfparallel.replicas.local_copies import first_copy
from tfparallel.replicas.owners import hook_owner
from tfparallel.replicas.variables import (
    CentralVariable,
    MetricVariable,
    ReplicatedVariable,
    is_statistics,
    mark_owner,
)


class ParameterServerExtended(CentralExtended):
    """Central storage whose one place is several servers."""

    _partitioned_class: type = CentralPartitionedVariable

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        cluster: ParameterServerCluster,
        partitioner: Callable | None,
    ):
        self._cluster, self._partitioner = cluster, partitioner
        self._placement = BalancedBytes(cluster.num_ps)
        self._place_next, self._updates = threading.local(), threading.local()
        super().__init__(container_strategy, [cluster.chief_device])

    def _description(self) -> str:
        devices = names_of_groups(self._cluster.worker_devices())  # of each worker
        cluster = f"num_workers={self._cluster.num_workers}, num_ps={self._cluster.num_ps}"
        return f"{cluster}, devices={devices}"

    def _compute_devices(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _initialize_strategy(self, devices: object) -> None:
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

    def _create_variable(self, next_creator: Callable, **kwargs: object) -> tf.Variable:
        layer = owner_of_new_variable() or layer_of_late_variable()
        hook_embedding(layer)
        hook_batch_norm(layer)  # its variables may be in parts
        hook_convolution(layer)
        kwargs["initial_value"] = _evaluated(kwargs.get("initial_value"), kwargs.get("dtype"))
        reference = kwargs.get("colocate_with")
        servers_and_rows = self._plan_parts(reference, kwargs)
        if servers_and_rows:
            return self._create_parts(servers_and_rows, next_creator, kwargs)
        size_bytes = _size_bytes(kwargs["initial_value"])
        if isinstance(reference, DistributedVariable):  # a slot, next to its weight
            server = self._cluster.ps_devices.index(first_copy(reference).device)
            self._placement.add(server, size_bytes)
        else:
            server = self._placement.place(size_bytes)
        self._place_next.device = self._cluster.ps_devices[server]
        return super()._create_variable(next_creator, **kwargs)

    def _plan_parts(self, reference: object, kwargs: Mapping[str, object]) -> list[tuple]:
        """The server, first row and end of each part; nothing for a variable in one piece."""
        value: tf.Tensor = kwargs["initial_value"]
        is_metric = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        if is_metric or not tf.is_tensor(value) or not tf.executing_eagerly():
            return []
        if isinstance(reference, Partitioned):  # a slot: its parts next to those of its weight
            if reference.shape != value.shape:
                return []
            servers = [self._cluster.ps_devices.index(part.device) for part in reference.parts]
            return [(s, *rows) for s, rows in zip(servers, reference.rows, strict=True)]
        count = num_parts(self._partitioner, value.shape, value.dtype)
        if count == 1 or isinstance(reference, DistributedVariable):
            return []
        sizes = [(_size_bytes(value[a:b]), a, b) for a, b in rows_of_parts(value.shape[0], count)]
        return [(self._placement.place(size), a, b) for size, a, b in sizes]

    def _create_parts(
        self, servers_and_rows: list[tuple], next_creator: Callable, kwargs: dict[str, object]
    ) -> tf.Variable:
        owner, strategy = owner_of_new_variable(), self._container_strategy()
        hook_owner(owner, strategy)
        value: tf.Tensor = kwargs["initial_value"]
        name = kwargs.get("name") or "Variable"
        is_slot = isinstance(kwargs.pop("colocate_with", None), Partitioned)

        def create_parts(**kwargs: object) -> list[tf.Variable]:
            parts = []
            for i, (server, start, end) in enumerate(servers_and_rows):
                if is_slot:
                    self._placement.add(server, _size_bytes(value[start:end]))
                kwargs.update(
                    initial_value=value[start:end],
                    shape=None,
                    name=f"{name}/part_{i}" if i else name,
                )
                with tf.device(self._cluster.ps_devices[server]), record.stop_recording():
                    parts.append(next_creator(**kwargs))
            return parts

        classes = dict.fromkeys(tf.VariableSynchronization, self._partitioned_class)
        variable = distribute_utils.create_mirrored_variable(
            strategy, create_parts, classes, {}, **kwargs
        )
        mark_owner(variable, owner, is_statistics(owner, kwargs))
        return variable

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        self._updates.by_part = is_elementwise(apply.__self__)  # type: ignore[attr-defined]
        return super()._apply_reduced(apply, gradients, variables)

    def _replica_ctx_update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        replica_id = values_util.get_current_replica_id_as_int()
        if not (isinstance(var, Partitioned) and replica_id == 0):
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        if not getattr(self._updates, "by_part", False):
            return fn(var, *args, **kwargs)
        args_of_parts = [_of_parts(var, arg) for arg in args]
        for i, part in enumerate(var.parts):
            with tf.device(part.device), of_part(i):
                fn(var, *(of_parts[i] for of_parts in args_of_parts), **kwargs)
        return None

    def _update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        if isinstance(var, Partitioned):
            return fn(var, *args, **kwargs)
        return super()._update(var, fn, args, kwargs, group)

    def _variable_class(self, owner: object, kwargs: Mapping[str, object]) -> type:
        return _ON_SERVERS[super()._variable_class(owner, kwargs)]

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        # What each replica keeps of its own rows is on the servers too: a worker may be lost.
        copies = 1 if issubclass(variable_class, CentralVariable) else len(self._devices)
        return (self._place_next.device,) * copies


_ON_SERVERS: dict[type, type] = {
    CentralVariable: ServerVariable,
    CentralLayerVariable: ServerLayerVariable,
    ReplicatedVariable: ServerStatistics,
    MetricVariable: ServerMetric,
}


def _evaluated(initial_value: object, dtype: object) -> tf.Tensor:
    """An initial value as a tensor, where one can be had now: its size decides its place."""
    if not tf.executing_eagerly():
        return initial_value
    value = initial_value() if callable(initial_value) else initial_value
    value = getattr(value, "wrapped_value", value)  # of a checkpoint being restored
    return tf.convert_to_tensor(value, dtype)


def _of_parts(variable: tf.Variable, argument: tf.Tensor | tf.IndexedSlices) -> list:
    """What an update of each part gets for an argument: its rows of a gradient."""
    is_gradient = isinstance(argument, tf.IndexedSlices) or (
        tf.is_tensor(argument)  # of a shape that may be known in part only
        and argument.shape.rank != 0
        and argument.shape.is_compatible_with(variable.shape)
    )
    if not is_gradient:
        return [argument] * len(variable.parts)
    return cut_rows(argument, variable.rows)


def _size_bytes(initial_value: object) -> int:
    shape, dtype = getattr(initial_value, "shape", None), getattr(initial_value, "dtype", None)
    if shape is None or dtype is None or not shape.is_fully_defined():
        return 0
    return shape.num_elements() * dtype.size
