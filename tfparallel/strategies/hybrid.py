"""Hybrid parallel: a mesh of devices whose axes divide rows, state, layers and matrices."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.compression_report import CompressionReport
from tfparallel.communication.local_sgd import Meeting
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.mirrored import MirroredLocalExtended
from tfparallel.hybrid.groups_as_stages import PipelinesOfGroupsExtended
from tfparallel.hybrid.mesh_options import check_options, mesh_here, sharding_on, told_of
from tfparallel.hybrid.mesh_over_processes import laid_over_processes
from tfparallel.hybrid.mesh_summary import MeshSummary
from tfparallel.hybrid.processes_of_job import (
    GradientsCrossing,
    ProcessesOfJob,
    gradients_crossing,
    processes_of_job,
    refuse_without_transport,
)
from tfparallel.hybrid.sharded_groups import ShardedGroupsExtended
from tfparallel.hybrid.shares_among_processes import (
    GroupsOfProcessesExtended,
    PipelinesOfProcessesExtended,
)
from tfparallel.measure.lanes import DrawnStep
from tfparallel.pipeline.extended import PipelineExtended
from tfparallel.pipeline.measured_step import measure_step
from tfparallel.pipeline.pipeline_options import PipelineOptions
from tfparallel.pipeline.plans.counts import check_choice
from tfparallel.pipeline.replicated import chosen_later
from tfparallel.pipeline.stages import Stages
from tfparallel.pipeline.summary import Summary
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import check_is_model
from tfparallel.replicas.compressed_gradients import CompressedGradients
from tfparallel.replicas.inner import inside_of, made
from tfparallel.replicas.interface import KerasExtended
from tfparallel.replicas.reporting_scope import ReportingScope
from tfparallel.segments.memory_policy import MemoryPolicy
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.in_one_process import LocalShardedExtended
from tfparallel.sharded.memory_table import MemoryTable, memory_table
from tfparallel.sharded.options import Sharding
from tfparallel.tensor_parallel import rules  # noqa: F401  (registers the rules of Keras's layers)
from tfparallel.tensor_parallel.extended import TensorParallelExtended
from tfparallel.tensor_parallel.found_layouts import FoundLayouts, lay_out
from tfparallel.tensor_parallel.holds_parts import HoldsParts
from tfparallel.tensor_parallel.layout_table import LayoutSummary
from tfparallel.tensor_parallel.layout_table import summary as summary_of_layout
from tfparallel.tensor_parallel.layouts import Layouts
from tfparallel.tensor_parallel.mesh_groups import MeshGroups


@checks_types
class HybridStrategy(KerasStrategy):
    """Trains on a mesh of devices, of one process or of several, as one device would.

    ```python
    strategy = tfparallel.HybridStrategy(
        {"data": 2, "pipeline": 2},
        pipeline=tfparallel.PipelineOptions(num_microbatches=8, schedule="zero_bubble"),
    )
    ```

    The axes are called "data" (or "batch"), "shard", "pipeline" and "model". Along "data" rows are
    divided; along "shard" too, and each device there has a part of the state; along "pipeline"
    layers are divided, and along "model" matrices. A mesh of one axis is what the strategy of that
    axis does: data `MirroredStrategy`, shard `ShardedStrategy`, pipeline `PipelineStrategy`, model
    `TensorParallelStrategy`.

    With `transport` the mesh has the devices of all processes of a job, rank after rank: the axes
    that are named first go over processes, "data" with whatever is inside of one, "shard" alone or
    behind "data", or all of "shard" with pipelines or an axis of the model inside of each. Without
    it the mesh is of this process, which may be `inner` of a `HorovodStrategy` or
    `MultiWorkerMirroredStrategy`.

    All axes go together: layers of a stage are computed in parts on its devices, and what a device
    would have of the state is in pieces along "shard".

    Args:
        mesh: a `keras.distribution.DeviceMesh`, or the size of each axis by its name, which takes
            all GPUs, or all logical CPUs where there are none. Beside a pipeline the places of a
            stage along "model" may name a device several times, if it has fewer than others.
        shard: what is in parts, `tfparallel.Sharding`. Its parts are along "shard", or along "data"
            where the mesh has no such axis.
        pipeline: `tfparallel.PipelineOptions`, of each pipeline.
        layout_map: a `keras.distribution.LayoutMap`, whose axis "model" (as the mesh calls it)
            divides matrices. Its own mesh, if it has one, must have axes of these names and sizes.
            Or "auto", for the layout that is found in each model when it is first used.
        memory: which activations are computed again in the backward pass, a
            `tfparallel.MemoryPolicy`; None keeps all but those of layers made in a
            `keras.RematScope`. In a pipeline it is the options' `rematerialize`.
        seed_by: "replica" (default): replicas draw random numbers from streams of their own. "row":
            each row of a batch draws what one device draws for it, so that a batch and a seed give
            the same training on every mesh, and on one device. It is for the layers that Keras has
            against overfitting (Dropout and its kin, in attention and recurrent layers too); others
            that draw are refused.
        prefetch_batches: how many batches are read and copied to the devices before their steps
            begin, on a mesh of "data" and "shard". None: 2 on GPUs, else 0.
        transport: what is between the processes of a job whose devices the mesh has: "ring",
            "collectives" or "horovod", or "auto", as `ShardedStrategy` takes them. None: the
            devices are those of this process.
        timeouts: with `transport`, how long processes wait for one another; those of Horovod for
            `start_s` and `stall_s` of it (300 s without it).
        compression: with `transport`, how gradients cross processes where rows alone do: a
            compressor of `tfparallel.compression`, or its name. None sends them as they are.
        check_weights_every: with `transport`, after so many steps the processes compare a hash of
            their weights, where each has all of them, and end with an error that names who has
            other ones. None compares nothing.

    Raises:
        ClusterConfigError: with `transport`, listing all that is wrong with `TF_CONFIG`.
        ImportError: if Horovod is not installed where it is asked for.
        WaitedTooLong: naming the processes that have not started.
        TypeError: for another mesh, another layout, or an argument that there is not, saying where
            it belongs.
        ValueError: for axes of unknown names, for a mesh of more or fewer places than devices, for
            devices that do not exist, for options of an axis that the mesh does not have, for
            those of `Sharding` that mean nothing on it, for a layout that names other axes, whose
            pattern is no regular expression, or that is to be found beside shards, for `memory`
            beside a pipeline's own `rematerialize`, for the options' `num_stages` where other axes
            than the pipeline have places, for axes over processes that have to be inside of one,
            for `timeouts`, `compression` or `check_weights_every` without `transport`, and for the
            last two where processes share the state.
    """

    _shares_among_processes = False
    _sharded_groups: type[ShardedGroupsExtended] = ShardedGroupsExtended
    _pipelines_of_groups: type[PipelinesOfGroupsExtended] = PipelinesOfGroupsExtended
    inner: "HybridStrategy | None" = None  # of each process, where rows alone go over processes
    _workers: CompressedGradients | None = None  # those processes
    _names_lost: Callable[[], AbstractContextManager | None] | None = None
    _groups_of_options: ClassVar[Mapping[str, type]] = {
        "pipeline": PipelineOptions,
        "shard": Sharding,
        "memory": MemoryPolicy,
    }

    def __init__(
        self,
        mesh: keras.distribution.DeviceMesh | Mapping[str, int],
        *,
        shard: Sharding | None = None,
        pipeline: PipelineOptions | None = None,
        layout_map: keras.distribution.LayoutMap | str | None = None,
        memory: MemoryPolicy | None = None,
        seed_by: str = "replica",
        prefetch_batches: int | None = None,
        transport: str | None = None,
        timeouts: WorkerTimeouts | None = None,
        compression: Meeting | str | None = None,
        check_weights_every: int | None = None,
    ):
        check_choice("seed_by", seed_by, ("replica", "row"))
        options: dict[str, Any] = {
            "shard": shard,
            "pipeline": pipeline,
            "layout_map": layout_map,
            "memory": memory,
            "seed_by": seed_by,
        }
        if transport is None:
            refuse_without_transport(
                timeouts=timeouts,
                compression=compression,
                check_weights_every=check_weights_every,
            )
        crossing = gradients_crossing(compression, check_weights_every)
        job = None if transport is None else processes_of_job(transport, timeouts)
        kept: Callable | None = None
        if job is not None and job.num_processes > 1:
            extended = self._over_processes(job, mesh, options, crossing)
        else:
            extended, kept = self._in_this_process(mesh, **options)
        if self.inner is None or prefetch_batches is not None:
            extended._read_ahead(prefetch_batches)
        super().__init__(extended, kept)

    def _in_this_process(
        self,
        mesh: object,
        shard: Sharding | None,
        pipeline: PipelineOptions | None,
        layout_map: object,
        memory: MemoryPolicy | None,
        seed_by: str,
    ) -> tuple[KerasExtended, Callable | None]:
        self._mesh = mesh_here(mesh)
        self._axes = self._mesh.over_processes(np.zeros(self._mesh.devices.shape))
        shard = sharding_on(self._mesh, shard)
        check_options(self._mesh, shard, pipeline, layout_map)
        pipeline = (pipeline or PipelineOptions()).keeping(memory)
        extended = self._new_extended(shard, pipeline, layout_map)
        kept = None
        if "pipeline" not in self._mesh.names:
            kept = self._kept_in_step(extended, memory or MemoryPolicy())
        if isinstance(extended, LocalShardedExtended):  # a layer computed again is a unit there
            extended._memory, kept = memory or MemoryPolicy(), None
        if seed_by == "row":
            extended._draw_by_row()
        return extended, kept

    def _over_processes(
        self,
        job: ProcessesOfJob,
        mesh: object,
        options: Mapping,
        crossing: GradientsCrossing,
    ) -> KerasExtended:
        """The `extended` on a mesh of the devices of several processes."""
        if not isinstance(mesh, Mapping) or not mesh:
            raise TypeError(
                "Over processes a mesh is the size of each axis by its name, the outermost first, "
                f"such as {{'data': 2, 'pipeline': 2}}. Received: {mesh!r}."
            )
        has_parts = options["shard"] is not None
        laid = laid_over_processes(mesh, job.num_processes, job.devices_each, has_parts)
        self._mesh = laid.mesh
        self._axes = laid.mesh.over_processes(laid.mesh.devices.astype(int) // job.devices_each)
        shard = sharding_on(self._mesh, options["shard"])
        check_options(self._mesh, shard, options["pipeline"], options["layout_map"])
        if laid.inner is None and shard is not None:
            crossing.refuse_beside_shared_state(self._mesh)
            if job.share_by_one_device and job.devices_each > 1:
                raise ValueError(
                    "Ranks of Horovod that share the state have one device each. Received: "
                    f"{job.devices_each} devices each. Start a rank for each device, or name "
                    f"'data' before 'shard', of {job.num_processes}."
                )
            extended = job.sharded(self, shard, laid.num_copies)
            extended._memory = options["memory"] or MemoryPolicy()
            if options["seed_by"] == "row":
                extended._draw_by_row()
            self._names_lost = extended._names_lost_ranks
            return extended
        kind: type[HybridStrategy] = HybridStrategy
        if laid.has_shares and shard is not None:
            crossing.refuse_beside_shared_state(self._mesh)
            kind, options = _InProcessThatShares, {**options, "shard": shard}
        workers = self._workers = job.around(self, crossing)
        self._names_lost = workers._names_lost_ranks
        told = told_of(mesh, shard, options["layout_map"])
        workers._agreement.require_equal("make a HybridStrategy", told)
        self.inner = made(lambda: kind(laid.inner, **options))
        return inside_of(self, self.inner, workers)

    def scope(self) -> AbstractContextManager:
        """`tf.distribute.Strategy.scope`; errors in it name a rank of Horovod that has ended."""
        names = None if self._names_lost is None else self._names_lost()
        return super().scope() if names is None else ReportingScope(super().scope(), names)

    @staticmethod
    def _kept_in_step(extended: KerasExtended, memory: MemoryPolicy) -> Callable:
        if isinstance(extended, HoldsParts):
            return memory.of_groups(extended.own_group)
        return memory.during

    def _new_extended(
        self, shard: Sharding | None, pipeline: PipelineOptions, layout_map: object
    ) -> Any:
        mesh = self._mesh
        places = mesh.devices.reshape(-1, *mesh.devices.shape[2:])  # data and shard as one axis
        axis = "shard" if "shard" in mesh.names else "data"
        num_shards = 1 if shard is None or self._shares_among_processes else mesh.size(axis)
        if "pipeline" in mesh.names:
            if pipeline.num_stages is not None:
                return self._with_chosen_devices(pipeline)
            schedule = pipeline.schedule_for(mesh.size("pipeline"))
            if "model" not in mesh.names and shard is None:
                first, *others = places[:, :, 0].tolist()
                return PipelineExtended(self, first, schedule, pipeline, others=others)
            layouts = self._layouts(places.reshape(-1, mesh.size("model")), layout_map)
            groups = places.tolist()
            return self._pipelines_of_groups(
                self, groups, schedule, pipeline, layouts, shard, num_shards
            )
        if "model" in mesh.names:
            layouts = self._layouts(places[:, 0], layout_map)
            if shard is None:
                return TensorParallelExtended(self, layouts)
            return self._sharded_groups(self, layouts, shard, num_shards)
        devices = mesh.devices.flatten().tolist()
        if shard is None:
            return MirroredLocalExtended(self, devices)
        return LocalShardedExtended(self, devices, shard, len(devices) // num_shards)

    def _with_chosen_devices(self, pipeline: PipelineOptions) -> PipelineExtended:
        """A pipeline whose stages get one device or several when their layers are measured."""
        names, devices = self._mesh.names, self._mesh.devices
        if devices.size != self._mesh.size("pipeline"):
            raise ValueError(
                "Which stage has several devices is chosen on a mesh whose one axis is the "
                f"pipeline. Received: num_stages={pipeline.num_stages} on a mesh of {self._mesh}. "
                "Several devices of a stage divide rows, as an axis of data does: take "
                f"{{{names['pipeline']!r}: {devices.size}}}, or leave num_stages out."
            )
        stages, microbatches = pipeline.num_stages or 1, pipeline.num_microbatches
        later = chosen_later(devices.reshape(-1, 1).tolist(), stages, microbatches)
        options = dataclasses.replace(pipeline, num_microbatches=later.num_microbatches)
        (first, *others), schedule = later.before, options.schedule_for(stages)
        return PipelineExtended(
            self, first, schedule, options, others=others, later=later, in_turn=bool(others)
        )

    def _layouts(
        self, groups: np.ndarray, layout_map: keras.distribution.LayoutMap | str | None
    ) -> Layouts:
        """Of the devices `[group, model]`; without an axis of the model nothing is laid out."""
        names = self._mesh.names
        axes = names.get("data"), names.get("model")
        of_devices = MeshGroups(tuple(map(tuple, groups.tolist())), *axes)
        if isinstance(layout_map, str):
            return FoundLayouts(None, of_devices)
        layout_map = keras.distribution.LayoutMap(None) if layout_map is None else layout_map
        return Layouts(layout_map, of_devices)

    def run(
        self,
        fn: Any,
        args: tuple = (),
        kwargs: dict | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """`tf.distribute.Strategy.run`; a layout that is to be found is found before."""
        if isinstance(self.extended, HoldsParts):
            self.extended.prepare_for(fn, args)
        return super().run(fn, args, kwargs, options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._mesh}: {self.extended._description()})"

    def compression_report(self) -> list[CompressionReport]:
        """What compression sends, for each optimizer that has trained; printed, it is a table."""
        return [] if self._workers is None else self._workers.compression_report()

    def stages(self, model: keras.Model) -> Stages:
        """Which stage each part of `model` runs on; as `PipelineStrategy.stages`.

        Raises:
            ValueError: on a mesh without an axis "pipeline".
        """
        if "pipeline" not in self._mesh.names:
            raise ValueError(f"Expected a mesh with an axis 'pipeline'. Received: {self._mesh}.")
        return self.extended._stages_of(model)  # type: ignore[attr-defined]

    def profile(self, model: keras.Model, batch: object) -> DrawnStep:
        """With pipelines of one process, the passes of all; as `PipelineStrategy.profile`.

        Over processes, the devices of all, as other strategies; with pipelines, too.
        """
        if "pipeline" in self._mesh.names and self.inner is None:
            return measure_step(self, model, batch)
        return super().profile(model, batch)

    def summary(self, model: keras.Model, inputs: object = None) -> MeshSummary:
        """What the mesh made of `model`, and which of its axes leave a process; `print` it.

        Its tables are those of the strategies of its axes: of stages, of weights in parts, and on a
        mesh of data and shards of what a step takes of each device.

        Args:
            model: built under this strategy.
            inputs: a batch of what it is called with, of all replicas: for activations of the last
                table, and for a layout of a model that is not functional.

        Raises:
            TypeError: for what is no model.
            ValueError: for a model that is not built, where state is in parts; under "auto", where
                the model's inputs are not known.
        """
        check_is_model(model)
        tables: list[Summary | LayoutSummary | MemoryTable] = []
        extended: Any = self.extended
        if "pipeline" in self._mesh.names:
            tables.append(extended._summary_of(model))
        if "model" in self._mesh.names:
            if isinstance(extended.layouts, FoundLayouts):
                lay_out(self, model, inputs)
            tables.append(summary_of_layout(model, extended.layouts, inputs))
        if isinstance(extended, ShardedExtended):
            with self.scope():
                tables.append(memory_table(extended, model, inputs))
        return MeshSummary(tuple(tables), self._axes)


class _InProcessThatShares(HybridStrategy):
    """What a process has of a mesh whose processes share one copy of the state."""

    _shares_among_processes = True
    _sharded_groups = GroupsOfProcessesExtended
    _pipelines_of_groups = PipelinesOfProcessesExtended
