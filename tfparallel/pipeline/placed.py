"""Where the variables of a pipeline live: once in each pipeline, on the device of their stage."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import BaseOptimizer, device_util, layer_of_late_variable, values_util
from tfparallel.pipeline.plans.pipelines_together import PipelinesTogether, pipelines_together
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.remote_stages import StageCluster
from tfparallel.pipeline.stage_variables import (
    LayerVariable,
    OptimizerNumber,
    SeedVariable,
    SequentialVariable,
    StageVariable,
)
from tfparallel.replicas.device_names import hosts_of, names_of_groups
from tfparallel.replicas.local import LocalExtended
from tfparallel.replicas.seed_hooks import seed_of_stream
from tfparallel.replicas.state_changes import StateChanges


class PlacedInStages(LocalExtended):
    """Variables that exist once in each pipeline, where the stage is that has their layer.

    Args:
        container_strategy: the strategy.
        devices: of the stages.
        schedule: for so many devices.
        cluster: that the devices are in, if they are in several processes.
        others: the devices of further pipelines, which have other rows. Replica `r` is microbatch
            `r % num_microbatches` of pipeline `r // num_microbatches`.
        in_turn: whether they are further devices of the same stages, which take microbatches in
            turn.
    """

    _changes: StateChanges | None  # of what layers assign, while a step is traced

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        schedule: Schedule,
        cluster: StageCluster | None,
        others: Sequence[Sequence[str]],
        in_turn: bool,
    ):
        super().__init__(container_strategy, devices[:1])  # which is in this process
        self._default_device = None
        self._schedule, self._cluster = schedule, cluster
        self._place_pipelines([devices, *others])
        self._has_stages_of_several = in_turn
        if cluster is not None:
            cluster.name_stages([self._device_of_stage(i) for i in range(schedule.num_stages)])
        self._creation = threading.local()

    def _place_pipelines(self, pipelines: Sequence[Sequence[str]]) -> None:
        """Takes these as the devices of each pipeline's stages."""
        self._pipelines = [[device_util.canonicalize(d) for d in each] for each in pipelines]
        self._groups: list[list[Sequence[str]]] = [[(d,) for d in each] for each in self._pipelines]
        self._stage_devices = self._pipelines[0]
        # Losses and metrics are computed where the last stage is.
        microbatches = range(self._schedule.num_microbatches)
        self._devices = tuple(each[-1] for each in self._pipelines for _ in microbatches)
        self._input_workers_devices = ((self._host_device, self._devices),)

    def _pipelines_together(self) -> PipelinesTogether:
        """What all devices do, in the order of the schedule."""
        return pipelines_together(self._schedule, self._pipelines)

    def _description(self) -> str:
        schedule = self._schedule
        count = schedule.num_microbatches
        if self._cluster:
            where = str(self._stage_devices)
        elif self._has_stages_of_several:
            count *= len(self._pipelines)
            where = str(names_of_groups([self._devices_of(i) for i in range(len(self._groups[0]))]))
        else:
            where = " + ".join(str(names_of_groups(pipeline)) for pipeline in self._groups)
        return f"num_stages={schedule.num_stages}, num_microbatches={count}, devices={where}"

    def _devices_of(self, place: int) -> list[str]:
        """All devices in one place of the pipelines, each once."""
        return list(dict.fromkeys(pipeline[place] for pipeline in self._pipelines))

    def outermost(self) -> tf.distribute.Strategy:
        """The strategy that trains: of several processes, where the pipeline is inside of one."""
        return self._container_strategy()

    def pipeline_of(self, replica: int) -> int:
        """Which pipeline a replica of this process is a microbatch of."""
        return replica // self._schedule.num_microbatches

    @property
    def _stored_stream(self) -> int:
        """As the base's: in a user's loop the number of the pipeline, whose copy differs."""
        if self._changes is not None:
            return 0
        return self.pipeline_of(values_util.get_current_replica_id_as_int())

    def seed_copy_of(self, replica: int) -> int:
        """Which copy of a seed a replica of this process draws from in a user's loop."""
        pipeline, microbatch = divmod(replica, self._schedule.num_microbatches)
        others = self._schedule.num_microbatches - 1
        count = len(self._pipelines)
        return pipeline if microbatch == 0 else count + pipeline * others + microbatch - 1

    def pipeline_of_seed_copy(self, index: int) -> int:
        """Which pipeline has copy number `index` of a seed."""
        count, others = len(self._pipelines), self._schedule.num_microbatches - 1
        return index if index < count else (index - count) // others

    @property
    def _is_updated_once(self) -> bool:
        """Whether the first pipeline updates for all, and their copies are told.

        No more is sent than sums of gradients would be, and an update is traced once.
        """
        return len(self._pipelines) > 1

    def is_first_replica(self) -> bool:
        """Whether the calling replica is the first microbatch of all, which updates for all."""
        return values_util.get_current_replica_id_as_int() == 0

    def _device_of_stage(self, stage: int) -> str:
        return self._stage_devices[self._schedule.device_of[stage]]

    def _groups_of_stage(self, stage: int) -> list[Sequence[str]]:
        """In each pipeline the devices of a stage; its functions are called on the first."""
        return [each[self._schedule.device_of[stage]] for each in self._groups]

    @property
    def _host_device(self) -> str:
        """Where batches are: the CPU of this process, whose device is the first."""
        return device_util.canonicalize("/device:CPU:0", self._stage_devices[0])

    def _hosts(self) -> list[str]:
        return hosts_of(self._stage_devices)

    # ---- where variables are created -------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: object) -> tf.Variable:
        leader = kwargs.get("colocate_with")
        self._creation.is_slot = isinstance(leader, StageVariable)
        if not isinstance(leader, StageVariable):
            self._creation.device = self._home(kwargs)
            variable = super()._create_variable(next_creator, **kwargs)
            if self._is_updated_once and isinstance(variable, StageVariable):
                variable.share_copies((0,) * len(self._pipelines))  # until stages are known
            return variable
        self._creation.device = leader.values[0].device  # an optimizer slot, with its variable
        variable = super()._create_variable(next_creator, **kwargs)
        leader._followers += (variable,)
        leader.move_to(leader.places())
        if self._is_updated_once:
            variable.share_copies((0,) * len(self._pipelines))
        return variable

    def _home(self, kwargs: Mapping[str, object]) -> str:
        """Where a variable lives as long as its stage is not known."""
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            return self._host_device
        # Metrics are computed where the last stage is. A GPU adds up no small integers.
        dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
        return self._stage_devices[-1] if dtype.is_floating else self._hosts()[-1]

    def _variable_class(self, owner: object, kwargs: Mapping[str, object]) -> type:
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
        self,
        variable_class: Any,
        i: int,
        device: str,
        copies: Sequence,
        kwargs: Mapping[str, object],
    ) -> object:
        value = super()._initial_value(variable_class, i, device, copies, kwargs)
        if variable_class is not SeedVariable or i == 0:
            return value
        pipeline = self.pipeline_of_seed_copy(i)
        return lambda: seed_of_stream(value() if callable(value) else value, pipeline)

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        is_seed = variable_class is SeedVariable
        count = len(self._devices if is_seed else self._pipelines)
        return (self._creation.device,) * count

    def _replica_ctx_update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        if not self.is_first_replica():
            return None  # the first one computes the same update, for all
        result = super()._replica_ctx_update(var, fn, args, kwargs, group)
        if isinstance(var, StageVariable):
            var.tell_copies()
        return result

    def _update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        """Outside of replicas. Where pipelines share slots the first one updates for all."""
        if not isinstance(var, StageVariable) or not var.is_shared:
            return super()._update(var, fn, args, kwargs, group)
        results: list = []

        def of_first(copy: tf.Variable, *args: object, **kwargs: object) -> object:
            if not results:
                results.append(fn(copy, *args, **kwargs))
            return results[0]

        updates = super()._update(var, of_first, args, kwargs, group)
        var.tell_copies()
        return updates
