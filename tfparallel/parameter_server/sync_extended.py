"""Parameter servers, with workers that share each batch and wait for one another."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.coordination.probe import task_names
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.coordination.watch import watch_once
from tfparallel.internals import (
    DistributedValues,
    ReduceOp,
    ReductionToOneDevice,
    TrainerCall,
    distribute_lib,
    record,
    surround_epochs,
)
from tfparallel.internals.distribute import gather
from tfparallel.parameter_server.batch_arguments import Host, Hosts
from tfparallel.parameter_server.extended import ParameterServerExtended
from tfparallel.parameter_server.fence import Fence
from tfparallel.parameter_server.recovery import Recovery
from tfparallel.parameter_server.remote_calls import own_executor
from tfparallel.parameter_server.repeated_steps import RepeatedSteps
from tfparallel.parameter_server.server_cluster import ParameterServerCluster
from tfparallel.parameter_server.shared_batches import shared_batches
from tfparallel.parameter_server.shared_step import SharedPredictStep, SharedStep
from tfparallel.parameter_server.steps_once import StepsOnce
from tfparallel.replicas.batch import OnHosts
from tfparallel.replicas.keras_step import run_predict_step
from tfparallel.replicas.layers_without_rows import never_without_rows
from tfparallel.replicas.sums_on_devices import sums_on_devices


class SyncParameterServerExtended(ParameterServerExtended):
    """Every device of every worker is a replica, and all share each batch."""

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        cluster: ParameterServerCluster,
        partitioner: Callable | None,
        timeouts: Timeouts,
        copy_every_steps: int | None,
    ):
        super().__init__(container_strategy, cluster, partitioner)
        self._recovery = Recovery(cluster, timeouts)
        addresses = task_names(cluster.tasks, "ps", "worker")
        watch_once(addresses, timeouts.ps_s, _somebody_waits_for, cuts_all=True)
        self._copy_every_steps = copy_every_steps
        self._fence = Fence(cluster.ps_devices) if copy_every_steps is not None else None
        self._steps: weakref.WeakSet[RepeatedSteps | StepsOnce] = weakref.WeakSet()  # by model

    def _changed_elsewhere(self) -> None:
        """A variable was assigned between steps."""
        for steps in self._steps:
            steps.changed_elsewhere()

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        own_executor()
        surround_epochs(call.epoch_iterator, self._watched)
        model: Any = call.model
        if model.run_eagerly or model.jit_compile:
            return super()._keras_dataset(dataset, call)
        self._set_functions(model, self._steps_of(model))
        batches = shared_batches(dataset, call, self._hosts(), self._recovery.generation)
        return super()._keras_dataset(dataset, call) if batches is None else batches

    def _hosts(self) -> Hosts:
        hosts, first = [], 0
        for worker, devices in enumerate(self._cluster.worker_devices()):
            replicas = range(first, first + len(devices))
            hosts.append(Host(worker, self._cluster.device("worker", worker), replicas))
            first = replicas.stop
        return Hosts(tuple(hosts))

    def _steps_of(self, model: keras.Model) -> RepeatedSteps | StepsOnce:
        functions = (model.train_function, model.test_function, model.predict_function)
        for function in functions:
            if isinstance(function, SharedStep) and function.steps in self._steps:
                return function.steps
        steps: RepeatedSteps | StepsOnce = StepsOnce()
        if self._fence is not None and self._copy_every_steps is not None:
            steps = RepeatedSteps(
                self._fence, self._recovery, self._copy_every_steps, _waiting_for_all
            )
        self._steps.add(steps)
        return steps

    def _set_functions(self, model: keras.Model, steps: RepeatedSteps | StepsOnce) -> None:
        """Keras uses the functions that it finds at a model, and compiles none of its own."""
        strategy = self._container_strategy()

        def run(step: Callable, batch: object) -> object:
            outputs = strategy.run(step, (self._for_replicas(batch),))
            return keras.tree.map_structure(self._mean_of_replicas, outputs)

        def train(batch: object) -> object:
            return run(model.train_step, batch)

        def test(batch: object) -> object:
            return run(model.test_step, batch)

        def predict(batch: object) -> object:
            batch = self._for_replicas(batch)
            if self._num_replicas_in_sync == 1:
                return strategy.run(model.predict_step, (batch,))
            with never_without_rows(model, self):
                return run_predict_step(strategy, model.predict_step, batch, model)

        chief = self._cluster.chief_device
        for name, step, function_class in (
            ("train_function", train, SharedStep),
            ("test_function", test, SharedStep),
            ("predict_function", predict, SharedPredictStep),
        ):
            known = getattr(model, name)
            if not (isinstance(known, SharedStep) and known.steps is steps):
                setattr(model, name, function_class(steps, model, step, chief, self._hosts()))

    def _trace_step_anew(self, model: keras.Model) -> None:
        if not isinstance(model.train_function, SharedStep):  # eager: the step is Keras's own
            super()._trace_step_anew(model)
            return
        model.train_function = None
        self._set_functions(model, self._steps_of(model))

    def _mean_of_replicas(self, value: object) -> object:
        """What is still of each replica of what a step returns, as Keras's own step reduces it."""
        local = self._container_strategy().experimental_local_results(value)
        return value if len(local) == 1 else tf.reduce_mean(local, axis=0)

    def _for_replicas(self, batch: object) -> object:
        """A batch as `run` takes it."""
        if isinstance(batch, OnHosts) and self._num_replicas_in_sync == 1:
            return batch[0].whole()
        return batch

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Within it, a task that is silent or gone ends what waits for it, with its name."""
        self._changed_elsewhere()  # whatever happened between two epochs
        waiting = _waiting_for_all if self._fence is None else _waiting_for_servers
        try:
            with waiting(), self._recovery.of_all():
                yield
        finally:
            for steps in self._steps:
                steps.forget()

    def _compute_devices(self) -> tuple[str, ...]:
        return tuple(device for worker in self._cluster.worker_devices() for device in worker)

    def _sum_gradients(self, gradients: list) -> list:
        """Summed where replica 0 is, which computes the updates for all."""

        def merge(_: tf.distribute.Strategy, *gradients: tf.distribute.DistributedValues) -> list:
            if all(self._is_summed(each, each) for each in gradients):
                return sums_on_devices(gradients, self._devices[:1])
            return self.batch_reduce_to(ReduceOp.SUM, [(each, each) for each in gradients])

        if not all(isinstance(each, tf.Tensor) for each in gradients):
            return super()._sum_gradients(gradients)
        with record.stop_recording():
            return distribute_lib.get_replica_context().merge_call(merge, args=tuple(gradients))

    def _local_reduction(self) -> tf.distribute.CrossDeviceOps:
        return ReductionToOneDevice()  # collectives do not reach the devices of other processes

    def _gather_to_implementation(
        self, value: object, destinations: object, axis: int, options: object
    ) -> object:
        if not isinstance(value, DistributedValues):
            return value
        return gather(ReductionToOneDevice(), value, destinations, axis)


_calls: dict[str, list] = {"all": [], "servers": []}  # under way, by whom they wait for


@contextlib.contextmanager
def _waiting(for_whom: str) -> Iterator[None]:
    _calls[for_whom].append(None)
    try:
        yield
    finally:
        _calls[for_whom].pop()


def _waiting_for_all() -> contextlib.AbstractContextManager:
    return _waiting("all")


def _waiting_for_servers() -> contextlib.AbstractContextManager:
    return _waiting("servers")


def _somebody_waits_for(silent: list[str]) -> bool:
    """Asynchronous training, for one, can do without a silent worker."""
    is_server_silent = any(name.startswith("ps ") for name in silent)
    return bool(_calls["all"] or (_calls["servers"] and is_server_silent))
