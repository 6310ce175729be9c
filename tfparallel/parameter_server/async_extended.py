"""Parameter servers, with workers that each take the next batch and wait for nobody."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.communication.compression.compression_report import CompressionReport
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.coordination.probe import is_answering, task_names
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.coordination.watch import always, watch_once
from tfparallel.internals import ReplicaContext, TrainerCall
from tfparallel.internals.keras_layers import behind, trained_by
from tfparallel.parameter_server.async_variables import AsyncMetricVariable, AsyncVariable
from tfparallel.parameter_server.batch_arguments import BatchArguments, ReadByChief
from tfparallel.parameter_server.compressed_gradient import (
    CompressionMemory,
    GradientsHandedIn,
    Payload,
    as_it_is,
)
from tfparallel.parameter_server.dataset_graph import DatasetGraph
from tfparallel.parameter_server.effects import Effects, current_effects
from tfparallel.parameter_server.extended import ParameterServerExtended
from tfparallel.parameter_server.keras_functions import (
    Batches,
    FedByChief,
    PredictFunction,
    StepFunction,
)
from tfparallel.parameter_server.metrics_at_servers import updated_at_servers
from tfparallel.parameter_server.partitioned_variables import AsyncPartitionedVariable
from tfparallel.parameter_server.remote_calls import own_executor
from tfparallel.parameter_server.remote_step import RemoteStep
from tfparallel.parameter_server.server_cluster import ParameterServerCluster
from tfparallel.parameter_server.worker_data import ArraysOnWorkers, DatasetOnWorkers
from tfparallel.parameter_server.worker_lanes import lanes_of_workers
from tfparallel.parameter_server.worker_pool import WorkerPool
from tfparallel.parameter_server.worker_state import WorkerStates
from tfparallel.replicas.local_copies import first_copy
from tfparallel.replicas.seed_hooks import global_generator_under


class AsyncParameterServerExtended(ParameterServerExtended):
    """One replica, which is whichever device of a worker takes the step."""

    _partitioned_class = AsyncPartitionedVariable

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        cluster: ParameterServerCluster,
        partitioner: Callable | None,
        max_staleness: int | None,
        timeouts: Timeouts,
        compressor: Compressor | None,
    ):
        super().__init__(container_strategy, cluster, partitioner)
        self._lanes = lanes_of_workers(cluster.worker_devices())
        self._pool = WorkerPool(cluster, self._lanes, max_staleness, timeouts)
        # The others train on: only what waits for the silent one shall fail.
        addresses = task_names(cluster.tasks, "ps", "worker")
        watch_once(addresses, timeouts.ps_s, always, cuts_all=False)
        self._lane = threading.local()
        self._states = WorkerStates(self._pool.generation)
        self._handed_in = GradientsHandedIn(compressor, self._states) if compressor else None
        # At the end of each epoch Keras waits for all tasks, also for one that is gone or stopped.
        # With this variable it does not; it is TensorFlow's own answer for its strategy.
        os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"

    def _compute_devices(self) -> tuple[str, ...]:
        # Where a step runs that was not handed to the pool.
        return (self._cluster.worker_devices()[0][0],)

    def settle(self) -> None:
        """Returns when the workers have done all steps, also those that fail."""
        if hasattr(self, "_pool"):
            self._pool.join()

    def _variable_class(self, owner: object, kwargs: Mapping[str, object]) -> type:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return AsyncMetricVariable
        return AsyncVariable

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        return (self._place_next.device,)

    # ---- how a step runs -------------------------------------------------------------------------

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> object:
        strategy = self._container_strategy()
        lane = getattr(self._lane, "number", None)
        device = self._devices[0] if lane is None else None  # the pool places its steps itself

        global_generator_under(strategy)  # a step that draws from it first could not create it
        with tf.device(device), LaneContext(strategy, 0 if lane is None else lane):
            return fn(*args, **kwargs)

    def _make_step(self, step_function: Callable, arguments: BatchArguments) -> RemoteStep:
        """`step_function` as a worker and the servers run it, for arguments like these."""
        strategy = self._container_strategy()

        def run(tensors: object, lane: tf.Tensor) -> object:
            self._lane.number = lane
            try:
                return strategy.run(step_function, (arguments.recipe(tensors),))
            finally:
                self._lane.number = None

        @contextlib.contextmanager
        def scope() -> Iterator[None]:
            with strategy.scope(), LaneContext(strategy, 0):
                yield

        return RemoteStep(run, arguments.specs, scope, self._states)

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        effects = current_effects()
        if effects is None:
            return super()._apply_reduced(apply, gradients, variables)
        optimizer: Any = apply.__self__  # type: ignore[attr-defined]
        updated = list(trained_by(optimizer) if variables is None else variables)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        scale = getattr(optimizer, "dynamic_scale", None)
        handed_in = [
            self._hand_in(effects, optimizer, updated[i], gradients[i], scale) for i in present
        ]
        tensors = [tensor for each in handed_in for tensor in each.tensors]
        devices = [
            first_copy(behind(updated[i])).device
            for i, each in zip(present, handed_in, strict=True)
            for _ in each.tensors
        ]
        if scale is not None:
            tensors.append(tf.convert_to_tensor(scale))
            devices.append(devices[0] if devices else self._cluster.ps_devices[0])

        def carry_out(values: list) -> None:
            scales = (None, None)
            if scale is not None:  # it may have changed since the worker scaled its loss
                scales = (values.pop(), tf.convert_to_tensor(scale))
            arrived = iter(values)
            restored: dict[int, Any] = {
                i: each.restore([next(arrived) for _ in each.tensors], *scales)
                for i, each in zip(present, handed_in, strict=True)
            }
            in_order = [restored.get(i) for i in range(len(gradients))]
            super(AsyncParameterServerExtended, self)._apply_reduced(apply, in_order, variables)

        what = f"optimizer '{optimizer.name}', applied"
        effects.defer(what, tensors, devices, carry_out)
        effects.update((behind(updated[i]) for i in present), optimizer.name)
        return None

    def _hand_in(
        self,
        effects: Effects,
        optimizer: object,
        variable: object,
        gradient: tf.Tensor | tf.IndexedSlices,
        scale: object,
    ) -> Payload:
        if self._handed_in is None:
            return as_it_is(gradient)
        return self._handed_in.hand_in(effects, optimizer, variable, gradient, scale)

    def compression_report(self) -> list[CompressionReport]:
        """What a worker hands in in one step, for each optimizer that has trained."""
        return self._handed_in.report() if self._handed_in else []

    def compression_of(self, optimizer: object) -> CompressionMemory | None:
        """What workers remember of a built optimizer's gradients; None where none is compressed."""
        if self._handed_in is None:
            return None
        addresses = [self._cluster.tasks["worker"][lane.worker] for lane in self._lanes]
        return self._handed_in.memory_of(
            optimizer, len(addresses), lambda lane: is_answering(addresses[lane])
        )

    def _steps_at_once(self, model: keras.Model, batch: object) -> Callable[[], set[int]]:
        """A step for each lane, handed out together; which lanes took one.

        That is all of them, as a rule: one that was faster may have taken two.
        """
        own_executor()
        function = StepFunction(self._pool, self._make_step, model, model.train_step)

        def run() -> set[int]:
            steps = [function.submit(ReadByChief.of_any_rows(batch)) for _ in self._lanes]
            for each in steps:
                self._pool.wait(each)
            return {each.lane for each in steps if each.lane is not None}

        return run

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        with super()._step_of(model), updated_at_servers(model):
            yield

    # ---- how a batch is split --------------------------------------------------------------------

    @property
    def _divides_data(self) -> bool:
        return len(self._lanes) > 1

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        own_executor()
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
            2 * len(self._lanes),
        )

    def _source(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        """Where batches come from: the workers' own data, or the chief where that cannot be."""
        if ArraysOnWorkers.can_take(call.data_adapter):
            return ArraysOnWorkers(call.data_adapter, self._pool.generation)
        if call.is_dataset_of_user:
            graph = DatasetGraph.of(dataset)
            if graph is not None:
                return DatasetOnWorkers(dataset, graph, self._pool.generation)
        return FedByChief(dataset)


class LaneContext(ReplicaContext):
    """The only replica of an asynchronous step; draws random numbers of the lane's own.

    Args:
        strategy: whose replica it is.
        lane: the number of the lane that computes, an int or a scalar int32 tensor.
    """

    def __init__(self, strategy: tf.distribute.Strategy, lane: tf.Tensor):
        super().__init__(strategy, 0)
        self._lane_number = lane
        self.graph = tf.compat.v1.get_default_graph()  # in which the step is traced

    @property
    def replica_id_in_sync_group(self) -> object:
        """The lane's number: seeds differ by it."""
        return tf.convert_to_tensor(self._lane_number)
