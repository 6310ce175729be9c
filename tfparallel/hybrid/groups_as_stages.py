"""Pipelines whose stages have several devices each, which compute layers in parts.

    pipeline 0      stage 0: devices 0, 1      stage 1: devices 2, 3
    pipeline 1      stage 0: devices 4, 5      stage 1: devices 6, 7

A stage is a function that is called on the first device of its group, and computes on all of them.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.hybrid.kept_wholes import KeepsWholes, KeptStageVariable
from tfparallel.hybrid.shards import HoldsShards
from tfparallel.hybrid.split_stage_variable import SplitStageVariable
from tfparallel.internals import device_util
from tfparallel.pipeline.extended import Homes, PipelineExtended
from tfparallel.pipeline.pipeline_options import PipelineOptions
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.stage_functions import StageFunctions
from tfparallel.pipeline.stages import Stages
from tfparallel.replicas.optimizer_hooks import GradientSource
from tfparallel.sharded.options import Sharding
from tfparallel.tensor_parallel.found_layouts import FoundLayouts, lay_out
from tfparallel.tensor_parallel.gradients import as_whole, in_parts
from tfparallel.tensor_parallel.layouts import Layouts
from tfparallel.tensor_parallel.rows import Rows


class PipelinesOfGroupsExtended(KeepsWholes, HoldsShards, PipelineExtended):
    """Pipelines of groups of devices, of which several may share copies of the state.

    Args:
        container_strategy: the strategy.
        groups: of each pipeline, for each of its places the devices there.
        schedule: of `options`, for so many places.
        options: of each pipeline.
        layouts: of weights in the devices of a group.
        sharding: what is in pieces; None for nothing.
        num_shards: how many pipelines, one behind the other, share a copy.
    """

    _sees_what_a_step_assigns = False

    @property
    def _split_class(self) -> type[SplitStageVariable]:  # type: ignore[override]
        return KeptStageVariable if self._keeps else SplitStageVariable

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        groups: Sequence[Sequence[Sequence[str]]],
        schedule: Schedule,
        options: PipelineOptions,
        layouts: Layouts,
        sharding: Sharding | None = None,
        num_shards: int = 1,
    ):
        self.layouts, self.sharding, self.num_shards = layouts, sharding, num_shards
        self._gathers = num_shards > 1
        first, *others = [[group[0] for group in pipeline] for pipeline in groups]
        super().__init__(container_strategy, first, schedule, options, others=others)
        self._groups = [
            [tuple(map(device_util.canonicalize, group)) for group in pipeline]
            for pipeline in groups
        ]
        self._group_of = {d: group for each in self._groups for group in each for d in group}

    def own_group(self) -> Sequence[str]:
        """The devices that the caller computes with: those of its stage."""
        return self._group_of.get(device_util.current(), self._groups[0][0])

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Where variables live: on all devices."""
        return tuple(self._group_of)

    def _devices_of_parts(self, rows: Rows, shards: int) -> tuple[str, ...]:
        copies = 1 if self._creation.is_slot else len(self._pipelines) // shards
        return (self._creation.device,) * (len(rows.sizes) * shards * copies)

    def _new_functions(self) -> StageFunctions:
        """As a pipeline's, into which the devices of a stage are written."""
        pipelines = [[d for group in each for d in group] for each in self._groups]
        return StageFunctions(len(pipelines) > 1, pipelines)

    def _stages_of(self, model: keras.Model) -> Stages:
        """As a pipeline's, of weights in parts: their devices are those of their stage."""
        if isinstance(self.layouts, FoundLayouts):
            lay_out(self._container_strategy(), model)
        return super()._stages_of(model)

    # ---- how gradients meet ----------------------------------------------------------------------

    def _reduce_gradients(
        self,
        gradients: list,
        homes: Homes | None = None,
        finish: Callable[[list], list] | None = None,
    ) -> list:
        """As a pipeline's, of gradients in parts each part where it is, or is stored."""
        if self._executors is None or self._compresses:
            return super()._reduce_gradients(gradients, homes, finish)
        variables = self._variables_of(gradients)
        pairs = zip(gradients, variables, strict=True)
        parts = [in_parts(g, v, stored=True) for g, v in pairs]
        both = list(zip(gradients, parts, strict=True))
        flat = [x for whole, own in both for x in ([whole] if own is None else own)]
        stored: list = []
        for own, variable in zip(parts, variables, strict=True):
            stored += [None] if own is None else variable.homes()

        def together(totals: list) -> list:
            sums = iter(totals)
            with tf.device(self._devices[0]):
                return [
                    next(sums) if own is None else as_whole([next(sums) for _ in own], v.stored)
                    for own, v in zip(parts, variables, strict=True)
                ]

        return super()._reduce_gradients(flat, stored, together)

    def _sum_gradients_across_workers(self, gradients: list, source: GradientSource | None) -> list:
        """Parts are of no variable that workers know."""
        return super()._sum_gradients_across_workers(
            gradients, source if self._compresses else None
        )

    # ---- how a variable is updated ---------------------------------------------------------------

    def _replica_ctx_update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        if not self.is_first_replica():
            return None  # the first one computes the same update, for all
        result = super()._replica_ctx_update(var, fn, args, kwargs, group)
        if isinstance(var, SplitStageVariable):
            var.tell_copies()
        return result
