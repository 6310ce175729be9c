"""How a pipeline runs a Keras step: microbatches as replicas, over variables that exist once."""

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.communication.joining import add_tensors, tensor_of
from tfparallel.internals import (
    BaseOptimizer,
    TrainerCall,
    device_util,
    distribute_lib,
    distribute_utils,
    is_stock_step,
    layer_of_late_variable,
    surround_epochs,
    values_util,
)
from tfparallel.internals.distribute import container_of
from tfparallel.internals.keras_layers import behind, layers_of
from tfparallel.measure.shares import Plan
from tfparallel.pipeline.batch_on_hosts import batch_on_hosts
from tfparallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.executors import Executors
from tfparallel.pipeline.first_batch import FirstBatches
from tfparallel.pipeline.gradient_sums import sum_gradients
from tfparallel.pipeline.pipeline_options import PipelineOptions
from tfparallel.pipeline.plan_of_shares import plan_of_shares
from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.profile import Cost, slowest
from tfparallel.pipeline.refusals import check_batch_norm
from tfparallel.pipeline.rematerialization import Rematerialization
from tfparallel.pipeline.remote_stages import StageCluster
from tfparallel.pipeline.stage_functions import StageFunctions
from tfparallel.pipeline.stage_scope import Placement
from tfparallel.pipeline.stage_variables import (
    LayerVariable,
    OptimizerNumber,
    SeedVariable,
    SequentialVariable,
    StageVariable,
)
from tfparallel.pipeline.staged_model import staged
from tfparallel.pipeline.stages import Budget, Stages, divide
from tfparallel.pipeline.summary import Summary, summarise
from tfparallel.pipeline.whole_batch_state import left_for_all_rows, new_found
from tfparallel.replicas.device_names import names_of_groups, short_names
from tfparallel.replicas.local import LocalExtended
from tfparallel.replicas.optimizer_hooks import GradientSource, gradient_source
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.seed_hooks import seed_of_stream
from tfparallel.replicas.state_changes import StateChanges, current_inputs


class PipelineExtended(LocalExtended):
    """Microbatches as replicas, over variables that exist once in each pipeline.

    Args:
        container_strategy: the strategy.
        devices: of the stages.
        schedule: of `options`, for so many devices.
        options: as `PipelineStrategy` explains them.
        cluster: that the devices are in, if they are in several processes.
        others: the devices of further pipelines, which have other rows. Replica `r` is microbatch
            `r % num_microbatches` of pipeline `r // num_microbatches`.
    """

    _gathers = False  # weights of a stage from other devices, when it is called
    _xla_can_predict = False  # a stage is a function that XLA does not know

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        schedule: Schedule,
        options: PipelineOptions,
        cluster: StageCluster | None = None,
        others: Sequence[Sequence[str]] = (),
    ):
        pipelines = [devices, *others]
        self._pipelines = [[device_util.canonicalize(d) for d in each] for each in pipelines]
        self._groups: list[list[Sequence[str]]] = [[(d,) for d in each] for each in self._pipelines]
        self._stage_devices = self._pipelines[0]
        super().__init__(container_strategy, devices[:1])  # which is in this process
        self._default_device = None
        self._schedule, self._options = schedule, options
        # Losses and metrics are computed where the last stage is.
        microbatches = range(schedule.num_microbatches)
        self._devices = tuple(each[-1] for each in self._pipelines for _ in microbatches)
        self._input_workers_devices = ((self._host_device, self._devices),)
        self._budget = stage_budget(schedule, options.memory_limit_bytes)
        self._placement = Placement(schedule.num_stages)
        self._cluster = cluster
        if cluster is not None:
            cluster.name_stages([self._device_of_stage(i) for i in range(schedule.num_stages)])
        self._known_stages: Any = weakref.WeakKeyDictionary()
        self._batches = FirstBatches(self._num_replicas_in_sync)
        self._creation = threading.local()
        self._executors: Executors | None = None
        self._averages: dict[int, SequentialVariable] = {}  # assigned in the step that is traced
        self._has_clock = self._has_changed_schedule = False
        self._found_of_layers = new_found()
        self._times: dict[Action, tf.Tensor] = {}
        self._reads: dict | None = None  # of `OptimizerNumber`s, while a step is traced
        self._changes: StateChanges | None = None  # of `LayerVariable`s, while a step is traced

    def _description(self) -> str:
        schedule = self._schedule
        if self._cluster:
            where = str(self._stage_devices)
        else:
            where = " + ".join(str(names_of_groups(pipeline)) for pipeline in self._groups)
        return (
            f"num_stages={schedule.num_stages}, num_microbatches={schedule.num_microbatches}, "
            f"devices={where}"
        )

    def outermost(self) -> tf.distribute.Strategy:
        """The strategy that trains: of several processes, where the pipeline is inside of one."""
        return self._container_strategy()

    # ---- several pipelines -----------------------------------------------------------------------

    def pipeline_of(self, replica: int) -> int:
        """Which pipeline a replica of this process is a microbatch of."""
        return replica // self._schedule.num_microbatches

    def is_first_of_pipeline(self) -> bool:
        """Whether the calling replica is its pipeline's first microbatch."""
        replica = values_util.get_current_replica_id_as_int()
        return replica % self._schedule.num_microbatches == 0

    # ---- where variables live --------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        leader = kwargs.get("colocate_with")
        self._creation.is_slot = isinstance(leader, StageVariable)
        if not isinstance(leader, StageVariable):
            self._creation.device = self._home(kwargs)
            return super()._create_variable(next_creator, **kwargs)
        self._creation.device = leader.values[0].device  # an optimizer slot, with its variable
        variable = super()._create_variable(next_creator, **kwargs)
        leader._followers += (variable,)
        leader.move_to(leader.places())
        return variable

    def _home(self, kwargs: Mapping[str, Any]) -> str:
        """Where a variable lives as long as its stage is not known."""
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            return self._host_device
        # Metrics are computed where the last stage is. A GPU adds up no small integers.
        dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
        return self._stage_devices[-1] if dtype.is_floating else self._hosts()[-1]

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
        if isinstance(owner, keras.random.SeedGenerator):
            return SeedVariable
        return SequentialVariable if is_in_turn else LayerVariable

    def _initial_value(
        self, variable_class: Any, i: int, device: str, copies: Sequence, kwargs: Mapping[str, Any]
    ) -> Any:
        value = super()._initial_value(variable_class, i, device, copies, kwargs)
        if variable_class is not SeedVariable or i == 0:
            return value
        return lambda: seed_of_stream(value() if callable(value) else value, i)

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        return (self._creation.device,) * len(self._pipelines)

    def _replica_ctx_update(
        self, var: Any, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> Any:
        if not self.is_first_of_pipeline():
            return None  # the first microbatch computes the same update, for all
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    # ---- how a step runs on replicas -------------------------------------------------------------

    @property
    def _replicas_of_users(self) -> int:
        """A pipeline is one replica; in a custom loop's `run`, its microbatches are."""
        context = distribute_lib.get_replica_context()
        if context is None or context.strategy is not self._container_strategy():
            return len(self._pipelines) * self._num_workers
        return self._num_replicas_in_sync

    def _arguments_of_step(self, step_function: Any, args: tuple) -> tuple:
        """Notes the batch, to measure layers with it."""
        if not is_stock_step(step_function) or not args:
            return args
        self._note_batch(step_function.__self__, args[0])
        return self._batch_for_step(args[0]), *args[1:]

    @property
    def _host_device(self) -> str:
        """Where batches are: the CPU of this process, whose device is the first."""
        return device_util.canonicalize("/device:CPU:0", self._stage_devices[0])

    def _reports_lost_stages(self) -> contextlib.AbstractContextManager | None:
        return None if self._cluster is None else self._cluster.reports_lost_stages()

    def _device_of_stage(self, stage: int) -> str:
        return self._stage_devices[self._schedule.device_of[stage]]

    def _groups_of_stage(self, stage: int) -> list[Sequence[str]]:
        """In each pipeline the devices of a stage; its functions are called on the first."""
        return [each[self._schedule.device_of[stage]] for each in self._groups]

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Any:
        if call.model not in self._known_stages:
            self._batches.note_arrays(call)
        if self._cluster is not None:
            surround_epochs(call, self._cluster.reports_lost_stages)
        return super()._keras_dataset(dataset, call)

    def _note_batch(self, model: keras.Model, data: Any) -> None:
        if model not in self._known_stages:
            self._batches.note_shapes(model, data)

    @property
    def _gathers_for_layers(self) -> bool:
        """False: microbatches come to a layer one after another (`StateChanges`)."""
        return False

    def _batch_for_step(self, data: Any) -> Any:
        if self._num_replicas_in_sync == 1:  # `Strategy.run` takes the batch as it is
            return data
        first = self._get_replica_id_in_sync_group(0)
        microbatches = range(first, first + len(self._devices))
        return batch_on_hosts(data, self._host_device, self._hosts()[-1], microbatches)

    def _stages_of(self, model: keras.Model) -> Stages:
        if model not in self._known_stages:
            check_batch_norm(model)
            inputs = self._batches.take(model)
            given = self._options.partition, self._placement, self._budget, inputs
            stages = divide(model, *given, self._agreed)
            homes = stages.homes()
            for variable in model.variables:
                if isinstance(behind(variable), StageVariable) and id(variable) in homes:
                    behind(variable).move_to(self._groups_of_stage(homes[id(variable)]))
            self._known_stages[model] = stages
        return self._known_stages[model]

    def _agreed(self, costs: list[Cost]) -> list[Cost]:
        """The same for all workers, whose clocks differ: a stage has the same layers in each."""
        if self._workers is None:
            return costs
        return slowest(self._workers._agreement.exchange("divide a model into stages", costs))

    def _summary_of(self, model: keras.Model) -> Summary:
        devices = [
            [device for group in self._groups_of_stage(stage) for device in group]
            for stage in range(self._schedule.num_stages)
        ]
        return summarise(model.name, self._stages_of(model), devices, self._budget.live)

    def _plan_of(self, model: keras.Model) -> Plan:
        if model not in self._known_stages:
            return super()._plan_of(model)
        specs = map(tf.DeviceSpec.from_string, self._stage_devices)
        where = [f"{each.job}:{each.task}/" if self._cluster else "" for each in specs]
        short = short_names(self._stage_devices)
        names = [f"{i} ({job}{name})" for i, (job, name) in enumerate(zip(where, short))]
        return plan_of_shares(self._schedule, self._known_stages[model], names)

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        if self._num_replicas_in_sync == 1:  # a batch in one piece needs no schedule
            yield
            return
        stages = self._stages_of(model)
        add_up = self._sum_list_across_workers
        deferred = DeferredBatchNorm(self._deferred_layers(model), add_up)

        def current_microbatch() -> int | None:
            step = current_replica_step()
            if step is None:
                return None
            microbatch = values_util.get_current_replica_id_as_int()
            deferred.shares[microbatch] = step.rows, step.weight
            return microbatch

        changes = StateChanges(model, current_microbatch, current_inputs, deferred.shares, add_up)
        traced = self._traced_step(model, stages, current_microbatch, deferred, changes)
        with contextlib.ExitStack() as around:
            around.enter_context(super()._step_of(model))
            strategy, found = self._container_strategy(), self._found_of_layers
            around.enter_context(left_for_all_rows(model, strategy, changes, found))
            if not tf.executing_eagerly():
                around.enter_context(traced)
            self._changes, self._averages = changes, {}
            try:
                yield
                changes.assign()
                self._average_over_pipelines(deferred.shares)
            finally:
                self._changes = None

    def note_average(self, variable: SequentialVariable) -> None:
        """Tells of an average that each pipeline keeps of its own rows in this step."""
        self._averages[id(variable)] = variable

    def _average_over_pipelines(self, shares: Mapping[int, tuple]) -> None:
        """Averages of each pipeline's own rows become their mean, weighted by rows."""
        if not self._averages or len(self._pipelines) * self._num_workers == 1:
            return
        count = self._schedule.num_microbatches
        weights = [
            tf.add_n([shares[m][1] for m in range(i, i + count)])
            for i in range(0, len(self._devices), count)
        ]
        variables = list(self._averages.values())
        means = []
        for variable in variables:
            with tf.device(variable.values[0].device):
                means.append(_weighted_sum([v.read_value() for v in variable.values], weights))
        means = self._sum_list_across_workers(means)
        for variable, mean in zip(variables, means, strict=True):
            for copy in variable.values:
                with tf.device(copy.device):
                    copy.assign(mean)

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
        self._executors = executors = self._new_executors(rematerialization)
        try:
            self._reads = {}
            with staged(
                model, stages, executors, current_microbatch, deferred, changes, rematerialization
            ):
                yield
            deferred.assign()
            graph = tf.compat.v1.get_default_graph()
            self._say_once(executors.order(graph))
            if self._has_clock:
                self._times = executors.add_clock(graph, self._hosts())
        finally:
            self._executors = self._reads = None

    @property
    def _shares_functions(self) -> bool:
        """Whether stages are traced once for all pipelines: no device is written into them."""
        return len(self._pipelines) > 1

    def _new_executors(self, rematerialization: Rematerialization) -> Executors:
        shared = StageFunctions(is_shared=True) if self._shares_functions else None
        each = []
        for i, devices in enumerate(self._pipelines):
            hosts = _hosts_of(devices) if self._options.offload else None
            own_copy = functools.partial(copy_in_pipeline, i)
            functions = shared or StageFunctions()
            each.append(
                Executor(
                    self._schedule,
                    devices,
                    rematerialization,
                    hosts,
                    functions,
                    own_copy,
                    self._groups[i],
                    self._gathers,
                )
            )
        return Executors(each, self._schedule.num_microbatches)

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
        return _hosts_of(self._stage_devices)

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
        step, executors = current_replica_step(), self._executors
        if step is not None:
            context.merge_call(lambda _: self._assign_changes())
        if step is None or executors is None:
            return super()._reduce_gradients(gradients)
        source = gradient_source()

        def merge(_: tf.distribute.Strategy, gradients: list, rows: Any) -> list:
            microbatches = range(len(self._devices))
            parts = [distribute_utils.select_replica(i, (gradients, rows)) for i in microbatches]
            sums = [sum_gradients(*each) for each in executors.by_pipeline(parts)]
            return self._sum_over_pipelines(sums, source)

        executors.end_round(values_util.get_current_replica_id_as_int())
        return context.merge_call(merge, args=(gradients, step.rows))

    def _sum_over_pipelines(self, sums: list[list], source: GradientSource | None) -> list:
        """Of each pipeline's sums over its microbatches, each copy where its pipeline has it."""
        totals = []
        for own in zip(*sums, strict=True):
            with tf.device(tensor_of(own[0]).device):
                totals.append(add_tensors(own))
        totals = self._sum_gradients_across_workers(totals, source)
        if len(sums) == 1:
            return totals
        results = []
        for total, own in zip(totals, zip(*sums, strict=True), strict=True):
            copies = []
            for each in own:
                with tf.device(tensor_of(each).device):
                    copies.append(tf.nest.map_structure(tf.identity, total, expand_composites=True))
            own_copies = [copies[self.pipeline_of(i)] for i in range(len(self._devices))]
            results.append(distribute_utils.regroup(tuple(own_copies), always_wrap=True))
        return results

    def _assign_changes(self) -> None:
        if self._changes is not None:
            self._changes.assign()

    def _apply_reduced(self, apply: Callable, gradients: list, variables: Any) -> Any:
        """The first microbatch updates for all; what others would compute for it is left out."""
        if self._executors is not None and not self.is_first_of_pipeline():
            return None
        applying = contextlib.nullcontext() if self._changes is None else self._changes.applying()
        with applying:
            return super()._apply_reduced(apply, gradients, variables)


def copy_in_pipeline(index: int, variable: Any) -> Any:
    """Pipeline number `index`'s copy of a variable, or of what that is a copy of."""
    container = variable if isinstance(variable, StageVariable) else container_of(variable)
    is_of_stage = isinstance(container, StageVariable)
    return container.copy_in(index, variable) if is_of_stage else variable


def _hosts_of(devices: Sequence[str]) -> list[str]:
    return [device_util.canonicalize("/device:CPU:0", device) for device in devices]


def _weighted_sum(values: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """Of values with a weight above zero: without rows they may be NaN."""
    weights = [tf.cast(weight, value.dtype) for value, weight in zip(values, weights, strict=True)]
    pairs = zip(values, weights, strict=True)
    return tf.add_n([weight * tf.where(weight > 0, value, 0) for value, weight in pairs])


def stage_budget(schedule: Schedule, memory_limit_bytes: int | None) -> Budget:
    """The stages of a device share its memory evenly."""
    if memory_limit_bytes is None:
        return Budget(simulate(schedule).peak_live_per_stage)
    stages_per_device = max(collections.Counter(schedule.device_of.values()).values())
    return Budget(simulate(schedule).peak_live_per_stage, memory_limit_bytes / stages_per_device)
