"""Variables on parameter servers, computation on workers, one program on the chief."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import tensorflow as tf

from tfparallel.cluster import read_tf_config
from tfparallel.parameter_server.cluster import ParameterServerCluster, Timeouts
from tfparallel.parameter_server.effects import current_effects
from tfparallel.parameter_server.keras_functions import (
    Batches,
    FedByChief,
    PredictFunction,
    StepFunction,
)
from tfparallel.parameter_server.partition import num_parts, rows_of_parts, split_rows
from tfparallel.parameter_server.placement import BalancedBytes
from tfparallel.parameter_server.remote_step import RemoteStep
from tfparallel.parameter_server.worker_data import ArraysOnWorkers, DatasetOnWorkers
from tfparallel.parameter_server.worker_pool import Arguments, WorkerPool
from tfparallel.servers.security import check_network
from tfparallel.strategies.async_variables import AsyncMetricVariable, AsyncVariable
from tfparallel.strategies.base import KerasStrategy, hook_owner
from tfparallel.strategies.central_storage import CentralStorageExtended
from tfparallel.strategies.mirrored import MirroredLocalExtended
from tfparallel.strategies.partitioned_variables import (
    AsyncPartitionedVariable,
    CentralPartitionedVariable,
    Partitioned,
    is_elementwise,
    of_part,
)
from tfparallel.strategies.seed_hooks import global_generator_under
from tfparallel.strategies.variables import CentralVariable, is_statistics, mark_owner
from tfparallel.tf_internals import (
    DistributedValues,
    DistributedVariable,
    ReductionToOneDevice,
    ReplicaContext,
    TrainerCall,
    distribute_utils,
    owner_of_new_variable,
    record,
    values_util,
)


class ParameterServerStrategy(KerasStrategy):
    """Trains on the workers of a cluster, with the variables on its parameter servers.

    Drop-in for `tf.distribute.ParameterServerStrategy`, under Keras's `fit` too. Every task runs
    the same script. On a worker or a parameter server the constructor serves until the chief is
    done and then ends the process with status 0: what comes after it runs on the chief, and on the
    evaluator, where the strategy is that of one device
    (`tfparallel.parameter_server.evaluate_checkpoints`).

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
        self._cluster_resolver = cluster_resolver
        if cluster.task_type == "evaluator":  # works alone, on what the chief has saved
            super().__init__(MirroredLocalExtended(self, ["GPU:0" if _has_gpu() else "CPU:0"]))
            return
        if cluster.is_server:
            cluster.serve(timeouts)
        cluster.connect(timeouts)
        extended: ParameterServerExtended
        if mode == "sync":
            extended = SyncParameterServerExtended(self, cluster, variable_partitioner)
        else:
            extended = AsyncParameterServerExtended(
                self, cluster, variable_partitioner, max_staleness, timeouts
            )
        super().__init__(extended)

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The cluster resolver of this strategy."""
        return self._cluster_resolver


class ParameterServerExtended(CentralStorageExtended):
    """Central storage whose one place is several servers."""

    _partitioned_class: type = CentralPartitionedVariable

    def __init__(
        self,
        container_strategy: Any,
        cluster: ParameterServerCluster,
        partitioner: Callable | None,
    ):
        self._cluster, self._partitioner = cluster, partitioner
        self._placement = BalancedBytes(cluster.num_ps)
        self._place_next, self._updates = threading.local(), threading.local()
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
        reference = kwargs.get("colocate_with")
        servers_and_rows = self._plan_parts(reference, kwargs)
        if servers_and_rows:
            return self._create_parts(servers_and_rows, next_creator, kwargs)
        size_bytes = _size_bytes(kwargs["initial_value"])
        if isinstance(reference, DistributedVariable):  # a slot, next to its weight
            server = self._cluster.ps_devices.index(reference.values[0].device)
            self._placement.add(server, size_bytes)
        else:
            server = self._placement.place(size_bytes)
        self._place_next.device = self._cluster.ps_devices[server]
        return super()._create_variable(next_creator, **kwargs)

    def _plan_parts(self, reference: Any, kwargs: Mapping[str, Any]) -> list[tuple]:
        """The server, first row and end of each part; nothing for a variable in one piece."""
        value = kwargs["initial_value"]
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
        self, servers_and_rows: list[tuple], next_creator: Callable, kwargs: dict[str, Any]
    ) -> tf.Variable:
        owner, strategy = owner_of_new_variable(), self._container_strategy()
        hook_owner(owner, strategy)
        value, name = kwargs["initial_value"], kwargs.get("name") or "Variable"
        is_slot = isinstance(kwargs.pop("colocate_with", None), Partitioned)

        def create_parts(**kwargs: Any) -> list[tf.Variable]:
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

    def _apply_reduced(self, apply: Callable, gradients: list, variables: Any) -> Any:
        self._updates.by_part = is_elementwise(apply.__self__)  # type: ignore[attr-defined]
        return super()._apply_reduced(apply, gradients, variables)

    def _replica_ctx_update(
        self, var: Any, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> Any:
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

    def _update(self, var: Any, fn: Callable, args: tuple, kwargs: dict, group: bool) -> Any:
        if isinstance(var, Partitioned):
            return fn(var, *args, **kwargs)
        return super()._update(var, fn, args, kwargs, group)

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


class AsyncParameterServerExtended(ParameterServerExtended):
    """One replica, which is whichever worker takes the step."""

    _partitioned_class = AsyncPartitionedVariable

    def __init__(
        self,
        container_strategy: Any,
        cluster: ParameterServerCluster,
        partitioner: Callable | None,
        max_staleness: int | None,
        timeouts: Timeouts,
    ):
        super().__init__(container_strategy, cluster, partitioner)
        devices = tuple(worker[0] for worker in cluster.worker_devices())
        self._pool = WorkerPool(cluster, devices, max_staleness, timeouts)
        self._worker = threading.local()
        # At the end of each epoch Keras waits for all tasks, also for one that is gone or stopped.
        # With this variable it does not; it is TensorFlow's own answer for its strategy.
        os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"

    def _compute_devices(self) -> tuple[str, ...]:
        # Where a step runs that was not handed to the pool.
        return (self._cluster.worker_devices()[0][0],)

    def _settle(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.join()

    def _variable_class(self, owner: object, kwargs: Mapping[str, Any]) -> type:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return AsyncMetricVariable
        return AsyncVariable

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        return (self._place_next.device,)

    # ---- how a step runs -------------------------------------------------------------------------

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        strategy = self._container_strategy()
        worker = getattr(self._worker, "number", None)
        device = self._devices[0] if worker is None else None  # the pool places its steps itself

        global_generator_under(strategy)  # a step that draws from it first could not create it
        with tf.device(device), WorkerContext(strategy, 0 if worker is None else worker):
            return fn(*args, **kwargs)

    def _make_step(self, step_function: Callable, arguments: Arguments) -> RemoteStep:
        """`step_function` as a worker and the servers run it, for arguments like these."""
        strategy = self._container_strategy()

        def run(parts: tuple, worker: tf.Tensor) -> Any:
            self._worker.number = worker
            try:
                return strategy.run(step_function, (arguments.batch(*parts),))
            finally:
                self._worker.number = None

        @contextlib.contextmanager
        def scope() -> Iterator[None]:
            with strategy.scope(), WorkerContext(strategy, 0):
                yield

        return RemoteStep(run, arguments.specs, scope)

    def _apply_reduced(self, apply: Callable, gradients: list, variables: Any) -> Any:
        effects = current_effects()
        if effects is None:
            return super()._apply_reduced(apply, gradients, variables)
        optimizer: Any = apply.__self__  # type: ignore[attr-defined]
        updated = list(optimizer._trainable_variables if variables is None else variables)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        tensors = [gradients[i] for i in present]
        devices = [updated[i]._value.values[0].device for i in present]
        scale = getattr(optimizer, "dynamic_scale", None)
        if scale is not None:
            tensors.append(tf.convert_to_tensor(scale))
            devices.append(devices[0] if devices else self._cluster.ps_devices[0])

        def carry_out(values: list) -> None:
            if scale is not None:  # it may have changed since the worker scaled its loss
                factor = tf.convert_to_tensor(scale) / values.pop()
                values = [value * tf.cast(factor, value.dtype) for value in values]
            arrived = dict(zip(present, values, strict=True))
            in_order = [arrived.get(i) for i in range(len(gradients))]
            super(AsyncParameterServerExtended, self)._apply_reduced(apply, in_order, variables)

        effects.defer(tensors, devices, carry_out)
        return None

    # ---- how a batch is split --------------------------------------------------------------------

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Any:
        model: Any = call.model
        if model.run_eagerly:
            raise ValueError(
                "run_eagerly=True runs Python for each step, which workers cannot. Received: it, "
                'under mode="async". Debug with mode="sync".'
            )
        for kind in {"fit": ("train", "test"), "evaluate": ("test",)}.get(
            call.method, ("predict",)
        ):
            function_class = PredictFunction if kind == "predict" else StepFunction
            known = getattr(model, f"{kind}_function")
            if not (isinstance(known, StepFunction) and known.pool is self._pool):
                step_function = getattr(model, f"{kind}_step")
                function = function_class(self._pool, self._make_step, model, step_function)
                setattr(model, f"{kind}_function", function)
        return Batches(
            self._source(dataset, call),
            call.num_batches,
            model.predict_function.submit if call.method == "predict" else None,
            2 * self._cluster.num_workers,
        )

    def _source(self, dataset: tf.data.Dataset, call: TrainerCall) -> Any:
        """Where batches come from: the workers' own data, or the chief where that cannot be."""
        if ArraysOnWorkers.can_take(call.data_adapter):
            return ArraysOnWorkers(call.data_adapter, self._pool.generation)
        if call.is_dataset_of_user:
            graph = DatasetOnWorkers.serialize(dataset)
            if graph is not None:
                return DatasetOnWorkers(dataset, graph, self._pool.generation)
        return FedByChief(dataset)


class WorkerContext(ReplicaContext):
    """The only replica of an asynchronous step; draws random numbers of the worker's own.

    Args:
        strategy: whose replica it is.
        worker: the number of the worker that computes, an int or a scalar int32 tensor.
    """

    def __init__(self, strategy: tf.distribute.Strategy, worker: Any):
        super().__init__(strategy, 0)
        self._worker_number = worker

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The worker's number: seeds differ by it."""
        return tf.convert_to_tensor(self._worker_number)


def _has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def _evaluated(initial_value: Any, dtype: Any) -> Any:
    """An initial value as a tensor, where one can be had now: its size decides its place."""
    if not tf.executing_eagerly():
        return initial_value
    value = initial_value() if callable(initial_value) else initial_value
    value = getattr(value, "wrapped_value", value)  # of a checkpoint being restored
    return tf.convert_to_tensor(value, dtype)


def _of_parts(variable: Any, argument: Any) -> list:
    """What an update of each part gets for an argument: its rows of a gradient."""
    is_gradient = isinstance(argument, tf.IndexedSlices) or (
        tf.is_tensor(argument)  # of a shape that may be known in part only
        and argument.shape.rank != 0
        and argument.shape.is_compatible_with(variable.shape)
    )
    if not is_gradient:
        return [argument] * len(variable.parts)
    return split_rows(argument, variable.rows)


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
