"""How a pipeline runs a Keras step: microbatches as replicas, over variables that exist once."""

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import (
    BaseOptimizer,
    TrainerCall,
    device_util,
    distribute_lib,
    distribute_utils,
    layer_of_late_variable,
    surround_epochs,
    values_util,
)
from tfparallel.internals.distribute import only_copy_of
from tfparallel.internals.keras_layers import behind, layers_of
from tfparallel.pipeline.batch_on_hosts import batch_on_hosts
from tfparallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.first_batch import FirstBatches
from tfparallel.pipeline.gradient_sums import sum_gradients
from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.refusals import check_batch_norm
from tfparallel.pipeline.rematerialization import Choice, Rematerialization
from tfparallel.pipeline.remote_stages import StageCluster
from tfparallel.pipeline.stage_scope import Placement
from tfparallel.pipeline.stage_variables import (
    LayerVariable,
    OptimizerNumber,
    SequentialVariable,
    StageVariable,
)
from tfparallel.pipeline.staged_model import staged
from tfparallel.pipeline.stages import Budget, Partition, Stages, divide
from tfparallel.pipeline.state_changes import StateChanges
from tfparallel.replicas.device_names import short_names
from tfparallel.replicas.local import LocalExtended
from tfparallel.replicas.replica_step import current_replica_step


@dataclass(frozen=True)
class Options:
    """Options of `PipelineStrategy`, as it explains them."""

    memory_limit_bytes: int | None
    batch_norm: str
    rematerialize: Choice
    offload: bool


class PipelineExtended(LocalExtended):
    """Microbatches as replicas, over variables that exist once."""

    _xla_can_predict = False  # a stage is a function that XLA does not know

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        schedule: Schedule,
        partition: Partition,
        options: Options,
        cluster: StageCluster | None = None,
    ):
        self._stage_devices = [device_util.canonicalize(device) for device in devices]
        super().__init__(container_strategy, devices[:1])  # which is in this process
        self._default_device = None
        self._schedule, self._partition, self._options = schedule, partition, options
        # Losses and metrics are computed where the last stage is.
        self._devices = (self._stage_devices[-1],) * schedule.num_microbatches
        self._input_workers_devices = ((self._host_device, self._devices),)
        self._budget = stage_budget(schedule, options.memory_limit_bytes)
        self._placement = Placement(schedule.num_stages)
        self._cluster = cluster
        if cluster is not None:
            cluster.name_stages([self._device_of_stage(i) for i in range(schedule.num_stages)])
        self._known_stages: Any = weakref.WeakKeyDictionary()
        self._batches = FirstBatches(schedule.num_microbatches)
        self._creation = threading.local()
        self._executor: Executor | None = None
        self._has_clock = self._has_changed_schedule = False
        self._times: dict[Action, tf.Tensor] = {}
        self._reads: dict | None = None  # of `OptimizerNumber`s, while a step is traced
        self._changes: StateChanges | None = None  # of `LayerVariable`s, while a step is traced

    def _description(self) -> str:
        where = self._stage_devices if self._cluster else short_names(self._stage_devices)
        schedule = self._schedule
        return (
            f"num_stages={schedule.num_stages}, num_microbatches={schedule.num_microbatches}, "
            f"devices={where}"
        )

    # ---- where variables live --------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        leader = kwargs.get("colocate_with")
        self._creation.is_slot = isinstance(leader, StageVariable)
        if not isinstance(leader, StageVariable):
            self._creation.device = self._home(kwargs)
            return super()._create_variable(next_creator, **kwargs)
        self._creation.device = only_copy_of(leader).device  # an optimizer slot, with its variable
        variable = super()._create_variable(next_creator, **kwargs)
        leader._followers += (variable,)
        return variable

    def _home(self, kwargs: Mapping[str, Any]) -> str:
        """Where a variable lives as long as its stage is not known."""
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return self._hosts()[-1]  # metrics are computed where the last stage is
        return self._host_device

    def _variable_class(self, owner: object, kwargs: Mapping[str, Any]) -> type:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return SequentialVariable
        if isinstance(owner, BaseOptimizer):
            return StageVariable if self._creation.is_slot else OptimizerNumber
        owner = owner or layer_of_late_variable()
        is_state = isinstance(owner, keras.Layer) and not kwargs.get("trainable")
        is_sum = kwargs.get("aggregation") == tf.VariableAggregation.SUM
        is_average = isinstance(owner, keras.layers.BatchNormalization)
        is_in_turn = is_state and (is_sum or is_average)
        is_seed = isinstance(owner, keras.random.SeedGenerator)
        return SequentialVariable if is_in_turn or is_seed else LayerVariable

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        return (self._creation.device,)

    def _replica_ctx_update(
        self, var: Any, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> Any:
        if values_util.get_current_replica_id_as_int() != 0:
            return None  # replica 0 computes the same update, for all
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    # ---- how a step runs on replicas -------------------------------------------------------------

    @property
    def _host_device(self) -> str:
        """Where batches are: the CPU of this process, whose device is the first."""
        return device_util.canonicalize("/device:CPU:0", self._stage_devices[0])

    def _reports_lost_stages(self) -> contextlib.AbstractContextManager | None:
        return None if self._cluster is None else self._cluster.reports_lost_stages()

    def _device_of_stage(self, stage: int) -> str:
        return self._stage_devices[self._schedule.device_of[stage]]

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Any:
        if call.model not in self._known_stages:
            self._batches.note_arrays(call)
        if self._cluster is not None:
            surround_epochs(call, self._cluster.reports_lost_stages)
        return dataset

    def _note_batch(self, model: keras.Model, data: Any) -> None:
        if model not in self._known_stages:
            self._batches.note_shapes(model, data)

    def _batch_for_step(self, data: Any) -> Any:
        if self._num_replicas_in_sync == 1:  # `Strategy.run` takes the batch as it is
            return data
        return batch_on_hosts(
            data, self._host_device, self._hosts()[-1], self._num_replicas_in_sync
        )

    def _stages_of(self, model: keras.Model) -> Stages:
        if model not in self._known_stages:
            check_batch_norm(model)
            inputs = self._batches.take(model)
            stages = divide(model, self._partition, self._placement, self._budget, inputs)
            homes = stages.homes()
            for variable in model.variables:
                if isinstance(behind(variable), StageVariable) and id(variable) in homes:
                    behind(variable).move_to(self._device_of_stage(homes[id(variable)]))
            self._known_stages[model] = stages
        return self._known_stages[model]

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        if self._num_replicas_in_sync == 1:  # a batch in one piece needs no schedule
            yield
            return
        stages = self._stages_of(model)
        deferred = DeferredBatchNorm(self._deferred_layers(model))

        def current_microbatch() -> int | None:
            step = current_replica_step()
            if step is None:
                return None
            microbatch = values_util.get_current_replica_id_as_int()
            deferred.shares[microbatch] = step.rows, step.weight
            return microbatch

        changes = StateChanges(model, current_microbatch, _current_inputs, deferred.shares)
        traced = self._traced_step(model, stages, current_microbatch, deferred, changes)
        with contextlib.nullcontext() if tf.executing_eagerly() else traced:
            self._changes = changes
            try:
                yield
                changes.assign()
            finally:
                self._changes = None

    @contextlib.contextmanager
    def _traced_step(
        self,
        model: keras.Model,
        stages: Stages,
        current_microbatch: Callable,
        deferred: DeferredBatchNorm,
        changes: StateChanges,
    ) -> Iterator[None]:
        rematerialization = Rematerialization(self._options.rematerialize, self._schedule)
        rematerialization.check_names([part.name for part in stages.parts])
        hosts = self._hosts() if self._options.offload else None
        self._executor = executor = Executor(
            self._schedule, self._stage_devices, rematerialization, hosts
        )
        try:
            self._reads = {}
            with staged(
                model, stages, executor, current_microbatch, deferred, changes, rematerialization
            ):
                yield
            deferred.assign()
            graph = tf.compat.v1.get_default_graph()
            self._say_once(executor.order(graph))
            if self._has_clock:
                self._times = executor.add_clock(graph, self._hosts())
        finally:
            self._executor = self._reads = None

    def _say_once(self, schedule: Schedule) -> None:
        """Says that steps run by `schedule`, if that is another one than was asked for."""
        if schedule is self._schedule or self._has_changed_schedule:
            return
        self._has_changed_schedule = True
        asked, used = simulate(self._schedule), simulate(schedule)
        tf.get_logger().warning(
            "Something in this step depends on several microbatches, as a loss that couples rows "
            "or divides by a sum over the batch does. So all forward passes are done before the "
            "first backward pass, not by schedule %r: stages keep activations of %s microbatches "
            "at once instead of %s. To spare them, use rematerialize='full' or offload=True.",
            self._schedule.name,
            used.peak_live_per_stage,
            asked.peak_live_per_stage,
        )

    @contextlib.contextmanager
    def _with_clock(self) -> Iterator[None]:
        """Steps traced within it leave the times of their passes in `_times`."""
        self._has_clock = True
        try:
            yield
        finally:
            self._has_clock, self._times = False, {}

    def _hosts(self) -> list[str]:
        return [device_util.canonicalize("/device:CPU:0", device) for device in self._stage_devices]

    def _deferred_layers(self, model: keras.Model) -> list[keras.layers.BatchNormalization]:
        if self._options.batch_norm != "deferred":
            return []
        all_layers = layers_of(model)
        found = [x for x in all_layers if isinstance(x, keras.layers.BatchNormalization)]
        names = [layer.name for layer in found if getattr(layer, "renorm", False)]
        if names or (found and tf.executing_eagerly()):
            received = f"renorm=True of {names}" if names else "run_eagerly=True"
            raise ValueError(
                "batch_norm='deferred' needs a traced step, and moving averages that nothing in "
                f"the step reads. Received: {received}. Leave that out, or use 'per_microbatch'."
            )
        return found

    # ---- how gradients meet ----------------------------------------------------------------------

    def _reduce_gradients(self, gradients: list) -> list:
        context = distribute_lib.get_replica_context()
        step, executor = current_replica_step(), self._executor
        if step is not None:
            context.merge_call(lambda _: self._assign_changes())
        if step is None or executor is None:
            return super()._reduce_gradients(gradients)

        def merge(_: tf.distribute.Strategy, gradients: list, rows: Any) -> list:
            microbatches = range(self._num_replicas_in_sync)
            parts = [distribute_utils.select_replica(i, (gradients, rows)) for i in microbatches]
            return sum_gradients(executor, *zip(*parts, strict=True))

        executor.end_round(values_util.get_current_replica_id_as_int())
        return context.merge_call(merge, args=(gradients, step.rows))

    def _assign_changes(self) -> None:
        if self._changes is not None:
            self._changes.assign()

    def _apply_reduced(self, apply: Callable, gradients: list, variables: Any) -> Any:
        """Replica 0 updates for all: what the others would compute to that end is left out."""
        if self._executor is not None and values_util.get_current_replica_id_as_int() != 0:
            return None
        applying = contextlib.nullcontext() if self._changes is None else self._changes.applying()
        with applying:
            return super()._apply_reduced(apply, gradients, variables)


def _current_inputs() -> list[tf.Tensor]:
    """The dense tensors of the calling thread's microbatch."""
    step = current_replica_step()
    return [] if step is None else tf.nest.flatten(step.inputs, expand_composites=True)


def stage_budget(schedule: Schedule, memory_limit_bytes: int | None) -> Budget:
    """The stages of a device share its memory evenly."""
    if memory_limit_bytes is None:
        return Budget(simulate(schedule).peak_live_per_stage)
    stages_per_device = max(collections.Counter(schedule.device_of.values()).values())
    return Budget(simulate(schedule).peak_live_per_stage, memory_limit_bytes / stages_per_device)
