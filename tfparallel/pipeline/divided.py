"""How a model is divided into the stages of a pipeline, once it is known what it is called with."""

import collections
import functools
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import TrainerCall, is_stock_step, surround_epochs
from tfparallel.internals.keras_layers import behind
from tfparallel.measure.shares import Plan
from tfparallel.pipeline.first_batch import FirstBatches
from tfparallel.pipeline.pipeline_options import PipelineOptions
from tfparallel.pipeline.placed import PlacedInStages
from tfparallel.pipeline.plan_of_shares import plan_of_shares
from tfparallel.pipeline.plans.replication import StageMemory, replicated_stages
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.profile import Cost, slowest
from tfparallel.pipeline.refusals import check_batch_norm
from tfparallel.pipeline.remote_stages import StageCluster
from tfparallel.pipeline.replicated import ChosenLater, first_with_copy
from tfparallel.pipeline.stage_scope import Placement
from tfparallel.pipeline.stage_variables import StageVariable
from tfparallel.pipeline.stages import Budget, Stages, divide, measured
from tfparallel.pipeline.summary import Summary, summarise
from tfparallel.replicas.checks import check_is_model
from tfparallel.replicas.device_names import short_names
from tfparallel.replicas.remat_scopes import without_remat_of_keras


class DividedModels(PlacedInStages):
    """Models in stages: divided when they are first trained, by what was measured of their layers.

    Args:
        container_strategy, devices, schedule, cluster, others, in_turn: as in `PlacedInStages`.
        options: as `PipelineStrategy` explains them.
        later: devices of which stages get one or several, when the first model is divided; None
            where it is known which stage has which.
    """

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        schedule: Schedule,
        options: PipelineOptions,
        cluster: StageCluster | None = None,
        others: Sequence[Sequence[str]] = (),
        later: ChosenLater | None = None,
        in_turn: bool = False,
    ):
        super().__init__(container_strategy, devices, schedule, cluster, others, in_turn)
        self._options, self._later = options, later
        self._budget = self._budget_of_stages(schedule, options.memory_limit_bytes)
        self._placement = Placement(schedule.num_stages)
        self._known_stages: Any = weakref.WeakKeyDictionary()
        self._tells_stages_apart = False
        self._batches = FirstBatches(self._num_replicas_in_sync)

    def _budget_of_stages(self, schedule: Schedule, limit: int | None) -> Budget:
        budget = stage_budget(schedule, limit)
        if not self._has_stages_of_several:
            return budget
        counts = [len(self._devices_of(schedule.device_of[i])) for i in range(schedule.num_stages)]
        sharing = [len(self._pipelines) // count for count in counts]
        live = [own * pipelines for own, pipelines in zip(budget.live, sharing, strict=True)]
        return Budget(live, budget.limit, counts)

    def _description(self) -> str:
        if self._later is None:
            return super()._description()
        later = self._later
        return (
            f"num_stages={later.num_stages}, "
            f"num_microbatches={later.num_microbatches * later.num_pipelines}, of "
            f"{len(later.devices)} devices each stage gets what is best for the first model"
        )

    def _arguments_of_step(self, step_function: Any, args: tuple) -> tuple:
        """Notes the batch, to measure layers with it."""
        if not is_stock_step(step_function) or not args:
            return args
        self._note_batch(step_function.__self__, args[0])
        return self._batch_for_step(args[0]), *args[1:]

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        if call.model not in self._known_stages:
            self._batches.note_arrays(call)
        if self._cluster is not None:
            surround_epochs(call.epoch_iterator, self._cluster.reports_lost_stages)
        return super()._keras_dataset(dataset, call)

    def _note_batch(self, model: keras.Model, data: object) -> None:
        if model not in self._known_stages:
            self._batches.note_shapes(model, data)

    def _stages_of(self, model: keras.Model) -> Stages:
        check_is_model(model)
        if model not in self._known_stages:
            check_batch_norm(model)
            inputs = self._batches.take(model)
            given = self._options.partition, self._placement, self._budget
            devices = self._first_devices()
            with without_remat_of_keras(model):  # layers are called, to be measured
                choose = None
                if self._later is not None:
                    choose = functools.partial(self._choose_devices, self._later)
                stages = divide(model, *given, devices, inputs, self._agreed, choose)
                if self._tells_stages_apart and stages.time_shares is None:
                    stages = measured(model, stages, devices, inputs, self._agreed)
            homes, moved = stages.homes(), set()
            for variable in model.variables:
                if isinstance(behind(variable), StageVariable) and id(variable) in homes:
                    groups = self._groups_of_stage(homes[id(variable)])
                    if behind(variable).move_to(groups):
                        moved.add(id(variable))
                    if self._is_updated_once:
                        firsts = first_with_copy([group[0] for group in groups])
                        behind(variable).share_copies(firsts)
            self._trace_anew(moved)
            self._known_stages[model] = stages
        return self._known_stages[model]

    def _trace_anew(self, moved: Collection[int]) -> None:
        """Has models that share variables with another, which has moved them, trace their steps."""
        for model in list(self._known_stages):
            if any(id(variable) in moved for variable in model.variables):
                for step in ("train", "test", "predict"):
                    if getattr(model, f"{step}_function") is not None:
                        getattr(model, f"make_{step}_function")(force=True)

    def _choose_devices(
        self, later: ChosenLater, costs: Sequence[Cost], of_weights: Sequence[int]
    ) -> Budget:
        """Gives each stage its devices, once for all models; what a stage may hold then."""
        limit, memory = self._options.memory_limit_bytes, None
        if limit is not None:
            live = simulate(self._schedule).peak_live_per_stage
            outputs = [cost.activation_bytes for cost in costs]
            together = [each * later.num_pipelines for each in live]
            memory = StageMemory(of_weights, outputs, together, limit)
        stages = replicated_stages(
            [cost.time for cost in costs],
            len(later.devices),
            num_stages=later.num_stages,
            boundary_costs=[cost.sending_time for cost in costs[:-1]],
            copy_costs=[cost.copying_time / len(self._devices) for cost in costs],
            allowed_devices=later.allowed,
            memory=memory,
        )
        self._place_pipelines(later.pipelines([stage.num_devices for stage in stages]))
        self._budget, self._later = self._budget_of_stages(self._schedule, limit), None
        return self._budget

    def _first_devices(self) -> list[str]:
        if self._later is not None:
            return list(self._later.devices)
        return [self._device_of_stage(i) for i in range(self._schedule.num_stages)]

    def _tell_stages_apart(self, model: keras.Model) -> None:
        """Measures what the stages take, from now on also where patterns divide a model."""
        self._tells_stages_apart = True
        stages = self._known_stages.get(model)
        if stages is not None and stages.time_shares is None:
            with without_remat_of_keras(model):
                devices = self._first_devices()
                self._known_stages[model] = measured(model, stages, devices, None, self._agreed)

    def _agreed(self, costs: list[Cost]) -> list[Cost]:
        """The same for all workers, whose clocks differ: a stage has the same layers in each."""
        if self._workers is None:
            return costs
        return slowest(self._workers._agreement.exchange("divide a model into stages", costs))

    def _summary_of(self, model: keras.Model) -> Summary:
        stages = self._stages_of(model)  # which may choose their devices
        devices = [
            list(dict.fromkeys(d for group in self._groups_of_stage(stage) for d in group))
            for stage in range(self._schedule.num_stages)
        ]
        return summarise(model.name, stages, devices, self._budget.live)

    def _plan_of(self, model: keras.Model) -> Plan:
        if model not in self._known_stages:
            return super()._plan_of(model)
        together = self._pipelines_together() if self._has_stages_of_several else None
        devices = self._stage_devices if together is None else together.devices
        specs = map(tf.DeviceSpec.from_string, devices)
        where = [f"{each.job}:{each.task}/" if self._cluster else "" for each in specs]
        names = [
            f"{i} ({job}{name})" for i, (job, name) in enumerate(zip(where, short_names(devices)))
        ]
        stages, counts = self._known_stages[model], self._budget.num_devices
        return plan_of_shares(together or self._schedule, stages, names, counts)


def stage_budget(schedule: Schedule, memory_limit_bytes: int | None) -> Budget:
    """The stages of a device share its memory evenly."""
    if memory_limit_bytes is None:
        return Budget(simulate(schedule).peak_live_per_stage)
    stages_per_device = max(collections.Counter(schedule.device_of.values()).values())
    return Budget(simulate(schedule).peak_live_per_stage, memory_limit_bytes / stages_per_device)
