"""How a pipeline runs a Keras step: microbatches as replicas, over variables that exist once."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import distribute_lib, distribute_utils, values_util
from tfparallel.internals.distribute import container_of
from tfparallel.internals.keras_layers import layers_of
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.pipeline.batch_on_hosts import batch_on_hosts
from tfparallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from tfparallel.pipeline.divided import DividedModels
from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.executors import Executors
from tfparallel.pipeline.gradient_sums import Functions, sum_gradients, sum_over_pipelines
from tfparallel.pipeline.pipeline_options import PipelineOptions
from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.rematerialization import Rematerialization
from tfparallel.pipeline.remote_stages import StageCluster
from tfparallel.pipeline.replicated import ChosenLater
from tfparallel.pipeline.row_seeds_of_stages import RowSeedsOfStages
from tfparallel.pipeline.stage_functions import StageFunctions
from tfparallel.pipeline.stage_variables import SequentialVariable, StageVariable
from tfparallel.pipeline.staged_model import staged
from tfparallel.pipeline.stages import Stages
from tfparallel.pipeline.whole_batch_state import left_for_all_rows, new_found
from tfparallel.replicas.device_names import hosts_of
from tfparallel.replicas.optimizer_hooks import GradientSource, gradient_source
from tfparallel.replicas.remat_scopes import without_remat_of_keras
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.state_changes import StateChanges, current_inputs
from tfparallel.segments.memory_policy import MemoryPolicy

Homes = Sequence[str | None]


class PipelineExtended(DividedModels):
    """Microbatches as replicas, over variables that exist once in each pipeline.

    Args:
        container_strategy, devices, schedule, options, cluster, others, later, in_turn: as in
            `DividedModels`.
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
        later: ChosenLater | None = None,
        in_turn: bool = False,
    ):
        super().__init__(
            container_strategy, devices, schedule, options, cluster, others, later, in_turn
        )
        self._executors: Executors | None = None
        self._averages: dict[int, SequentialVariable] = {}  # assigned in the step that is traced
        self._has_clock = self._has_changed_schedule = False
        self._found_of_layers = new_found()
        self._times: dict[Action, tf.Tensor] = {}
        self._reads: dict | None = None  # of `OptimizerNumber`s, while a step is traced
        self._changes: StateChanges | None = None  # of `LayerVariable`s, while a step is traced

    # ---- how a step runs on replicas -------------------------------------------------------------

    @property
    def _replicas_of_users(self) -> int:
        """A pipeline is one replica; in a custom loop's `run`, its microbatches are."""
        context = distribute_lib.get_replica_context()
        if context is None or context.strategy is not self._container_strategy():
            count = 1 if self._has_stages_of_several else len(self._pipelines)
            return count * self._num_workers
        return self._num_replicas_in_sync

    def _reports_lost_stages(self) -> contextlib.AbstractContextManager | None:
        return None if self._cluster is None else self._cluster.reports_lost_stages()

    @property
    def _gathers_for_layers(self) -> bool:
        """False: microbatches come to a layer one after another (`StateChanges`)."""
        return False

    def _batch_for_step(self, data: object) -> object:
        if self._num_replicas_in_sync == 1:  # `Strategy.run` takes the batch as it is
            return data
        first = self._get_replica_id_in_sync_group(0)
        microbatches = range(first, first + len(self._devices))
        return batch_on_hosts(data, self._host_device, self._hosts()[-1], microbatches)

    def _draw_by_row(self) -> None:
        self._row_seeds = RowSeedsOfStages(self._container_strategy)

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        if self._num_replicas_in_sync == 1:  # a batch in one piece needs no schedule
            with MemoryPolicy().during(model):  # as layers of a `keras.RematScope` say
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
            around.enter_context(without_remat_of_keras(model))
            if isinstance(self._row_seeds, RowSeedsOfStages):
                around.enter_context(self._row_seeds.counted(model))
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
            sum_in_order([shares[m][1] for m in range(i, i + count)])
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
            with (
                rematerialization.as_scopes_say(model),
                staged(
                    model,
                    stages,
                    executors,
                    current_microbatch,
                    deferred,
                    changes,
                    rematerialization,
                    self._row_seeds,
                ),
            ):
                yield
            deferred.assign()
            graph = tf.compat.v1.get_default_graph()
            self._say_once(executors.order(graph))
            if self._has_clock:
                self._times = executors.add_clock(graph, list(map(hosts_of, self._pipelines)))
        finally:
            self._executors = self._reads = None

    def _new_functions(self) -> StageFunctions:
        """Stages are traced once for all pipelines."""
        return StageFunctions(is_shared=len(self._pipelines) > 1)

    def _new_executors(self, rematerialization: Rematerialization) -> Executors:
        functions, each = self._new_functions(), []
        for i, devices in enumerate(self._pipelines):
            hosts = hosts_of(devices) if self._options.offload else None
            own_copy = functools.partial(copy_in_pipeline, i)
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

    def _behind(self, part: object) -> contextlib.AbstractContextManager:
        """Nothing of a step is done before there is a batch.

        At the end of data of unknown length there is none, and TensorFlow ends the step while it
        runs: whether what needs no data was done by then (`iterations`, weight decay) would depend
        on which of the stages' devices was faster.
        """
        leaves = tf.nest.flatten(part, expand_composites=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
        if tf.executing_eagerly() or not tensors:
            return super()._behind(part)
        return tf.control_dependencies(tensors[:1])

    # ---- how gradients meet ----------------------------------------------------------------------

    def _reduce_gradients(
        self,
        gradients: list,
        homes: Homes | None = None,
        finish: Callable[[list], list] | None = None,
    ) -> list:
        """The sum of each gradient over microbatches, pipelines and workers.

        Args:
            gradients: of this microbatch.
            homes: of each gradient, the device where its variable is updated; None for where the
                first pipeline's own sum is, as without `homes`.
            finish: what all microbatches are given instead, of these sums.
        """
        context = distribute_lib.get_replica_context()
        step, executors = current_replica_step(), self._executors
        if step is not None:
            context.merge_call(lambda _: self._assign_changes())
        if step is None or executors is None:
            sums = super()._reduce_gradients(gradients)
            return sums if finish is None else finish(sums)
        source = gradient_source()

        def merge(
            _: tf.distribute.Strategy, gradients: list, rows: tf.distribute.DistributedValues
        ) -> list:
            microbatches = range(len(self._devices))
            parts = [distribute_utils.select_replica(i, (gradients, rows)) for i in microbatches]
            functions: Functions = {}
            sums = [sum_gradients(*each, functions) for each in executors.by_pipeline(parts)]
            totals = self._sum_over_pipelines(sums, functions, source, homes)
            return totals if finish is None else finish(totals)

        executors.end_round(values_util.get_current_replica_id_as_int())
        return context.merge_call(merge, args=(gradients, step.rows))

    def _sum_over_pipelines(
        self,
        sums: list[list],
        functions: Functions,
        source: GradientSource | None,
        homes: Homes | None,
    ) -> list:
        """Of each pipeline's sums over its microbatches, where the first pipeline updates."""
        totals = sum_over_pipelines(sums, homes, functions)
        return self._sum_gradients_across_workers(totals, source)

    def _assign_changes(self) -> None:
        if self._changes is not None:
            self._changes.assign()

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        """The first microbatch updates for all; what others would compute for it is left out."""
        if self._executors is not None and not self.is_first_replica():
            return None
        applying = contextlib.nullcontext() if self._changes is None else self._changes.applying()
        with applying:
            return super()._apply_reduced(apply, gradients, variables)


def copy_in_pipeline(index: int, variable: tf.Variable) -> tf.Variable:
    """Pipeline number `index`'s copy of a variable, or of what that is a copy of."""
    container = variable if isinstance(variable, StageVariable) else container_of(variable)
    is_of_stage = isinstance(container, StageVariable)
    return container.copy_in(index, variable) if is_of_stage else variable


def _weighted_sum(values: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """Of values with a weight above zero: without rows they may be NaN."""
    weights = [tf.cast(weight, value.dtype) for value, weight in zip(values, weights, strict=True)]
    pairs = zip(values, weights, strict=True)
    return sum_in_order([weight * tf.where(weight > 0, value, 0) for value, weight in pairs])
