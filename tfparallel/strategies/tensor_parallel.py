"""Tensor parallel: the matrices of a layer are cut, and several devices compute one layer."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.coordination.timeouts import Timeouts, WorkerTimeouts
from tfparallel.hybrid.ranks_of_job import JobOfRanks, job_of_ranks, ranks_of
from tfparallel.internals.keras_layers import layout_map_of
from tfparallel.pipeline.devices import stage_devices
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import check_is_model
from tfparallel.replicas.device_names import all_devices_here, short_names
from tfparallel.replicas.reporting_scope import ReportingScope
from tfparallel.segments.memory_policy import MemoryPolicy
from tfparallel.tensor_parallel import rules  # noqa: F401  (registers the rules of Keras's layers)
from tfparallel.tensor_parallel.branch_layouts import FoundBranches, given_branches
from tfparallel.tensor_parallel.extended import TensorParallelExtended
from tfparallel.tensor_parallel.found_layouts import FoundLayouts, lay_out
from tfparallel.tensor_parallel.layout_table import LayoutSummary, summary
from tfparallel.tensor_parallel.layouts import Layouts
from tfparallel.tensor_parallel.mesh_groups import MeshGroups, group_of_ranks, mesh_groups
from tfparallel.tensor_parallel.over_ranks import TensorParallelOverRanks

Layout: TypeAlias = keras.distribution.LayoutMap | keras.distribution.ModelParallel | dict | str


@checks_types
class TensorParallelStrategy(KerasStrategy):
    """Computes each layer on several devices, as Keras's `LayoutMap` says.

    ```python
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), ["gpu:0", "gpu:1"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*hidden.*kernel"] = (None, "model")  # columns: each device has half of the outputs
    layout[".*scores.*kernel"] = ("model", None)  # rows: each device has half of the inputs
    strategy = tfparallel.TensorParallelStrategy(layout)
    ```

    Along the mesh's axis of the batch rows are divided, as under `MirroredStrategy`; along the
    other one a group of devices computes each replica. A layout never changes a result.

    Args:
        layout: "auto", for the layout that is found in each model; "branches", where each device
            computes whole branches of a model, or a dict from patterns of layers' paths to numbers
            of devices, for the same; or a `keras.distribution.LayoutMap`; or a
            `keras.distribution.ModelParallel`, whose layouts and name of the batch's axis are
            taken.
        batch_dim_name: the mesh's axis of replicas; by default the one called "batch" or "data",
            else the first of two.
        device_mesh: of "auto", "branches" and a dict; by default one group of all GPUs, or of all
            CPUs.
        sequence_parallel: whether LayerNorm, Dropout and sums of `[rows, positions, features]`
            between a layer by rows and one by columns are computed in parts along positions, too:
            each device keeps its share of these activations. As many bytes are sent.
        memory: which activations are computed again in the backward pass, a
            `tfparallel.MemoryPolicy`; None keeps all but those of layers made in a
            `keras.RematScope`.
        cluster_resolver: of processes whose devices compute together; the script runs in the first,
            the others serve it. Then number 1 of a mesh, `cpu:1`, is that of the second process,
            or the second of all GPUs. `TF_CONFIG` counts only as a `TFConfigClusterResolver`.
        transport: "ring": each process of `TF_CONFIG` runs the script, traces its own part of the
            model, and exchanges by this package's ring. "horovod": the same of each rank that
            `horovodrun` has started, by Horovod. All get the same data, of which neighbours
            that are a replica of the mesh take their rows. Whoever reads a whole weight outside of
            a step (`get_weights`, `save`) gathers it, on all of them. None:
            there is one process, or one that controls those of `cluster_resolver`.
        check_weights_every: with a `transport`, after so many steps ranks compare a hash of what
            several of them hold: weights that are not in parts, and parts, where there are several
            replicas. All end with a `WeightsDifferError` that names who differs. None: never.
        insecure_network: says that strangers cannot reach the network between the processes. Needed
            for addresses other than loopback: TensorFlow's servers know no authentication.
        timeouts: how long processes wait for one another: `WorkerTimeouts` with a `transport`.

    Raises:
        ClusterConfigError: with a `transport`, listing all that is wrong with `TF_CONFIG`.
        DisagreementError: with a `transport`, at the first step, naming ranks of which one has
            another model or layout.
        NotImplementedError: with a `transport`, at the first step, naming what would need a part
            that another rank stores.
        RuntimeError: between processes, if there are variables before the strategy.
        StageLost: from training, naming a process that is gone or does not answer.
        TimeoutError: naming the processes that never came.
        TypeError: for another layout.
        ValueError: for axes that the mesh does not have, devices that do not exist, and a layout
            that names the model's axis twice.
    """

    def __init__(
        self,
        layout: Layout,
        batch_dim_name: str | None = None,
        *,
        device_mesh: keras.distribution.DeviceMesh | None = None,
        sequence_parallel: bool = False,
        memory: MemoryPolicy | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        transport: str | None = None,
        check_weights_every: int | None = None,
        insecure_network: bool = False,
        timeouts: Timeouts | WorkerTimeouts | None = None,
    ):
        _check_sequences(layout, sequence_parallel)
        if transport is not None:
            given = {"cluster_resolver": cluster_resolver, "memory": memory}
            mesh = (layout, batch_dim_name, device_mesh)
            copies_of = functools.partial(_num_replicas, *mesh)
            job = job_of_ranks(self, transport, layout, given, timeouts, copies_of)
            self._begin_as_rank(job, *mesh, sequence_parallel, check_weights_every)
            return
        if check_weights_every is not None:
            raise ValueError(
                "Where one process controls all devices it computes with one value of each weight. "
                f"Received: check_weights_every={check_weights_every} without a `transport`. Leave "
                "it out."
            )
        if isinstance(timeouts, WorkerTimeouts):
            raise TypeError(f"Without a `transport` expected Timeouts. Received: {timeouts}.")
        cluster, of_cluster = None, None
        if cluster_resolver is not None:
            timeouts = timeouts or Timeouts()
            found, cluster = stage_devices(
                None, cluster_resolver, insecure_network, timeouts, type(self).__name__
            )
            of_cluster = None if cluster is None else found
        reports = None if cluster is None else cluster.reports_lost_stages
        layouts = _layouts(
            layout,
            batch_dim_name,
            device_mesh,
            of_cluster,
            lambda mesh, name: mesh_groups(mesh, name, of_cluster),
        )
        layouts.cuts_sequences = sequence_parallel
        extended = TensorParallelExtended(self, layouts, reports)
        super().__init__(extended, (memory or MemoryPolicy()).of_groups(extended.own_group))

    def _begin_as_rank(
        self,
        job: JobOfRanks,
        layout: Layout,
        batch_dim_name: str | None,
        device_mesh: keras.distribution.DeviceMesh | None,
        sequence_parallel: bool,
        check_weights_every: int | None,
    ) -> None:
        workers, devices = job.workers, job.devices
        layouts = _layouts(
            layout,
            batch_dim_name,
            device_mesh,
            devices,
            lambda mesh, name: group_of_ranks(mesh, name, devices, workers._id_in_cluster),
        )
        layouts.cuts_sequences = sequence_parallel
        ranks, replicas = ranks_of(job, layouts.groups.parts)
        extended = TensorParallelOverRanks(self, layouts, workers, ranks, replicas)
        if check_weights_every is not None:
            extended._check_weights(check_weights_every, job.collectives)
        super().__init__(extended, MemoryPolicy().of_groups(extended.own_group))

    extended: TensorParallelExtended

    def scope(self) -> contextlib.AbstractContextManager:
        """`tf.distribute.Strategy.scope`; errors within it name a process that is lost."""
        reports = self.extended.reports_lost_processes
        return super().scope() if reports is None else ReportingScope(super().scope(), reports())

    def run(
        self,
        fn: Any,
        args: tuple = (),
        kwargs: dict | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """`tf.distribute.Strategy.run`; a layout that is to be found is found before."""
        self.extended.prepare_for(fn, args)
        return super().run(fn, args, kwargs, options)

    def summary(self, model: keras.Model, inputs: object = None) -> LayoutSummary:
        """A table of what the layout made of `model`'s weights; `print` it.

        Under `layout="auto"` it puts the weights in parts, if no step has done so yet.

        Args:
            model: built under this strategy.
            inputs: a batch of what it is called with, for a model that is not functional.

        Returns:
            For each weight its parts, the bytes of the largest, and how its layer is computed, or
            why it is whole. Then, for each layer that multiplies or sends, how it is cut, its share
            of the products, and the bytes of each tensor that it sends, for one row of the batch.

        Raises:
            TypeError: for what is no model.
            ValueError: under "auto", where the model's inputs are not known.
        """
        check_is_model(model)
        if isinstance(self.extended.layouts, FoundLayouts):
            lay_out(self, model, inputs)
        return summary(model, self.extended.layouts, inputs)


def _layouts(
    layout: Layout,
    batch_dim_name: str | None,
    device_mesh: keras.distribution.DeviceMesh | None,
    of_cluster: Sequence[str] | None,
    groups_of: Callable[[keras.distribution.DeviceMesh, str | None], MeshGroups],
) -> Layouts:
    """What `layout` says of the groups that `groups_of` makes of a mesh and its batch's axis."""
    make_layouts = _made_without_mesh(layout)
    if make_layouts is not None:
        return make_layouts(groups_of(device_mesh or _all_devices(of_cluster), batch_dim_name))
    if device_mesh is not None:
        raise ValueError(
            "device_mesh is for 'auto', 'branches' and a dict; a LayoutMap has its own. "
            f"Received: device_mesh={device_mesh!r} with {layout!r}."
        )
    if isinstance(layout, keras.distribution.ModelParallel):
        batch_dim_name = batch_dim_name or layout.batch_dim_name
        layout = layout_map_of(layout)
    if not isinstance(layout, keras.distribution.LayoutMap):
        raise TypeError(
            "Expected 'auto', 'branches', a dict of patterns, a keras.distribution.LayoutMap "
            f"or ModelParallel. Received: {layout!r}. Make one with "
            "keras.distribution.LayoutMap(device_mesh)."
        )
    return Layouts(layout, groups_of(layout.device_mesh, batch_dim_name))


def _check_sequences(layout: Layout, sequence_parallel: bool) -> None:
    if sequence_parallel and (layout == "branches" or isinstance(layout, dict)):
        raise ValueError(
            "Sequences are in parts between layers that are in parts; those of branches are whole. "
            f"Received: sequence_parallel=True with layout={layout!r}. Leave it out, or take "
            "'auto' or a LayoutMap."
        )


def _num_replicas(
    layout: Layout,
    batch_dim_name: str | None,
    device_mesh: keras.distribution.DeviceMesh | None,
    num_ranks: int,
) -> int:
    """How many replicas a layout's mesh, or `device_mesh`, makes of so many ranks."""
    names = [f"/job:rank/task:{i}/device:CPU:0" for i in range(num_ranks)]

    def groups_of(mesh: keras.distribution.DeviceMesh, name: str | None) -> MeshGroups:
        return mesh_groups(mesh, name, names)

    layouts = _layouts(layout, batch_dim_name, device_mesh, names, groups_of)
    return len(layouts.groups.groups)


def _made_without_mesh(layout: object) -> Callable | None:
    """What makes the layouts of a group's devices, for a `layout` that names none."""
    if isinstance(layout, dict):
        return functools.partial(given_branches, layout)
    by_name: dict = {"auto": FoundLayouts, "branches": FoundBranches}
    kind = by_name.get(layout) if isinstance(layout, str) else None
    return None if kind is None else functools.partial(kind, None)


def _all_devices(of_cluster: Sequence[str] | None) -> keras.distribution.DeviceMesh:
    """One group of all GPUs, or of all CPUs; of the processes of a cluster, if there is one."""
    if of_cluster is not None:
        numbers = [f"cpu:{i}" for i in range(len(of_cluster))]
        return keras.distribution.DeviceMesh((1, len(numbers)), ("batch", "model"), numbers)
    names = [name.lower() for name in short_names(all_devices_here())]
    return keras.distribution.DeviceMesh((1, len(names)), ("batch", "model"), names)
