"""Pipeline parallel: layers on several devices, microbatches on their way through them.

A microbatch is a replica, over variables that exist once: the batch is split, each microbatch runs
the model's own `train_step`, and gradients are summed before the optimizer looks at them, as under
every data-parallel strategy. What is different is where a layer computes, and in which order.
"""

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.pipeline.action import Action
from tfparallel.pipeline.counts import check_choice, check_counts
from tfparallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.gradient_sums import sum_gradients
from tfparallel.pipeline.placement import Placement
from tfparallel.pipeline.profile import ROWS, zeros_like_spec
from tfparallel.pipeline.rematerialization import Choice, Rematerialization
from tfparallel.pipeline.schedule import Schedule
from tfparallel.pipeline.schedules.registry import build_schedule
from tfparallel.pipeline.simulation import simulate
from tfparallel.pipeline.staged_model import staged
from tfparallel.pipeline.stages import Budget, Partition, Stages, divide
from tfparallel.pipeline.summary import Summary, summarise
from tfparallel.pipeline.swimlane import Swimlane, swimlane
from tfparallel.pipeline.validation import validate
from tfparallel.strategies.base import KerasStrategy, LocalExtended
from tfparallel.strategies.checks import check_devices
from tfparallel.strategies.replica_step import current_replica_step
from tfparallel.strategies.variables import CentralVariable
from tfparallel.tf_internals import (
    ArrayDataAdapter,
    DistributedValues,
    ReductionToOneDevice,
    TrainerCall,
    device_util,
    distribute_lib,
    distribute_utils,
    is_keras_step,
    uses_stock_train_step,
    values_util,
)


class PipelineStrategy(KerasStrategy):
    """Layers divided over devices; microbatches of every batch pass through them in a pipeline.

    Trains to the weights of one device. `batch_size` stays that of the whole batch: it is split
    into microbatches inside the step, of which every row counts once.

    Args:
        devices: names such as `["GPU:0", "GPU:1"]`; None takes all GPUs, or all logical CPUs.
        num_microbatches: parts of a batch. Default: 4 for each stage, which leaves the devices idle
            for less than a fifth of the time.
        schedule: "1f1b" (default), "gpipe", "interleaved_1f1b" or "zero_bubble", or a
            `tfparallel.pipeline.schedule.Schedule` of your own.
        partition: "balanced" (default) measures the layers and makes the slowest stage as fast as
            can be; or, for every stage, a list of shell-style patterns of layer names.
            Layers constructed in `with strategy.stage(i):` go where that says.
        chunks_per_device: stages on each device, for "interleaved_1f1b" only; there 2 by default.
        memory_limit_bytes: the most that "balanced" puts on a device: variables, two copies of
            their gradients, optimizer slots, and the outputs of layers for the microbatches that a
            stage holds at once. Default: no limit.
        batch_norm: BatchNorm normalises each microbatch by its own statistics. "per_microbatch"
            (default) also updates the moving averages once for each, as one device does that
            accumulates gradients; "deferred" once for each batch, by the statistics of all its
            rows, as one device does that sees the whole batch.
        rematerialize: activations that are computed again in the backward pass instead of kept:
            "none" (default); "full"; "except_last", all but those of a microbatch whose backward
            pass directly follows its forward pass, which saves no memory; or a set of shell-style
            patterns of layer names.
        offload: whether what the forward pass keeps is on the host until the backward pass.

    Raises:
        ValueError: for devices that do not exist or are named twice, counts below 1, or a schedule
            that is unknown, incomplete or would deadlock.

    Source: GPipe, Huang et al., https://arxiv.org/abs/1811.06965; 1F1B: PipeDream-flush, Narayanan
    et al., https://arxiv.org/abs/2104.04473.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        num_microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        partition: Partition = "balanced",
        *,
        chunks_per_device: int | None = None,
        memory_limit_bytes: int | None = None,
        batch_norm: str = "per_microbatch",
        rematerialize: Choice = "none",
        offload: bool = False,
    ):
        devices = check_devices(devices) or _all_devices()
        if isinstance(schedule, str):
            if num_microbatches is None:
                num_microbatches = 4 * len(devices) * (chunks_per_device or 1)
            check_counts(num_microbatches=num_microbatches)
            schedule = build_schedule(schedule, len(devices), num_microbatches, chunks_per_device)
        _check_schedule(schedule, len(devices), num_microbatches)
        if memory_limit_bytes is not None:
            check_counts(memory_limit_bytes=memory_limit_bytes)
        check_choice("batch_norm", batch_norm, ("per_microbatch", "deferred"))
        Rematerialization(rematerialize, schedule)  # raises
        options = Options(memory_limit_bytes, batch_norm, rematerialize, offload)
        super().__init__(PipelineExtended(self, devices, schedule, partition, options))

    @property
    def schedule(self) -> Schedule:
        """The order of passes on each device."""
        return self.extended._schedule

    def stages(self, model: keras.Model) -> Stages:
        """Which stage each part of `model`, which must be built, runs on.

        Before the first step there is no batch to measure: then zeros take its place, for good.
        """
        return self.extended._stages_of(model)

    def stage(self, index: int) -> contextlib.AbstractContextManager:
        """Puts the layers that are constructed within it on stage `index`.

        Then every layer of the model must be constructed so. Nothing is measured.
        """
        return self.extended._placement.stage(index)

    def summary(self, model: keras.Model) -> Summary:
        """A table of the stages of `model`, which must be built; `print` it."""
        extended, schedule = self.extended, self.schedule
        devices = [extended._device_of_stage(stage) for stage in range(schedule.num_stages)]
        return summarise(model.name, extended._stages_of(model), devices, extended._budget.live)

    def profile(self, model: keras.Model, batch: Any) -> Swimlane:
        """Measures when each pass of a training step starts and ends.

        `print` the result, or `save_png` or `save_trace` it. Two steps run, of which the second is
        measured; then weights, optimizer and metrics are put back to what they were. On a GPU a
        pass ends when its kernels are launched.

        Args:
            model: compiled under this strategy.
            batch: `(x, y)` or `(x, y, sample_weight)`, arrays or tensors.
        """
        batch = keras.tree.map_structure(tf.convert_to_tensor, batch)
        extended = self.extended
        with self.scope():
            x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
            model._symbolic_build(data_batch=(x, y, weight))
            optimizer = model.optimizer
            optimizer.build(model.trainable_variables)
            variables = [*model.variables, *optimizer.variables, *model.metrics_variables]
            before = [variable.numpy() for variable in variables]

            @tf.function
            def step(batch: Any) -> list[tf.Tensor]:
                self.run(model.train_step, args=(batch,))
                times.update(extended._times)
                return [times[action] for action in times]

            times: dict = {}
            with extended._with_clock():
                step(batch)
                measured = step(batch)
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
        times_s = {action: tuple(own.numpy()) for action, own in zip(times, measured, strict=True)}
        names = [device.rpartition("device:")[2] for device in extended._stage_devices]
        return swimlane(self.schedule, times_s, names)

    def run(
        self, fn: Any, args: tuple = (), kwargs: dict | None = None, options: Any = None
    ) -> Any:
        """`tf.distribute.Strategy.run`; notes a Keras step's batch, to measure layers with it."""
        if is_keras_step(fn) and uses_stock_train_step(fn.__self__) and args:
            self.extended._note_batch(fn.__self__, args[0])
        return super().run(fn, args, kwargs, options)


@dataclass(frozen=True)
class Options:
    """Options of `PipelineStrategy`, as it explains them."""

    memory_limit_bytes: int | None
    batch_norm: str
    rematerialize: Choice
    offload: bool


class StageVariable(CentralVariable):
    """A variable that lives once, on its stage's device; replica 0 assigns it for all."""

    _followers: tuple = ()

    def move_to(self, device: str) -> None:
        """Moves the variable, and the optimizer slots that follow it, to `device`."""
        for variable in (self, *self._followers):
            old = variable._primary
            if device_util.canonicalize(old.device) == device_util.canonicalize(device):
                continue
            with tf.init_scope(), tf.device(device):
                new = type(old)(
                    old.read_value(),
                    trainable=old.trainable,
                    name=old.name.partition(":")[0],
                    dtype=old.dtype,
                    synchronization=old.synchronization,
                    aggregation=old.aggregation,
                )
            new._distributed_container = weakref.ref(variable)
            new._unique_id = old._unique_id  # what Keras's optimizers know a variable by
            variable._values = (new,)


class SequentialVariable(StageVariable):
    """A variable that every microbatch assigns in turn: metrics, BatchNorm's averages, seeds."""

    deferred_to: Callable | None = None  # takes BatchNorm's averages; see `DeferredBatchNorm`

    def _update_replica(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        if self.deferred_to is not None and self.deferred_to(self, value):
            return self._primary
        return update_fn(self._primary, value, **kwargs)


class PipelineExtended(LocalExtended):
    """Microbatches as replicas, over variables that exist once."""

    _user_cross_device_ops = None

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        schedule: Schedule,
        partition: Partition,
        options: Options,
    ):
        super().__init__(container_strategy, devices[-1:])
        self._stage_devices = [device_util.canonicalize(device) for device in devices]
        self._schedule, self._partition, self._options = schedule, partition, options
        # Losses and metrics are computed where the last stage is.
        self._devices = (self._stage_devices[-1],) * schedule.num_microbatches
        self._input_workers_devices = ((self._host_device, self._devices),)
        self._budget = _budget(schedule, options.memory_limit_bytes)
        self._placement = Placement(schedule.num_stages)
        self._known_stages: Any = weakref.WeakKeyDictionary()
        self._batches: Any = weakref.WeakKeyDictionary()  # inputs of one microbatch, by model
        self._creation = threading.local()
        self._executor: Executor | None = None
        self._has_clock = False
        self._times: dict[Action, tf.Tensor] = {}

    # ---- where variables live --------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        leader = kwargs.get("colocate_with")
        if not isinstance(leader, StageVariable):
            self._creation.device = self._host_device
            return super()._create_variable(next_creator, **kwargs)
        self._creation.device = leader._primary.device  # an optimizer slot, with its variable
        variable = super()._create_variable(next_creator, **kwargs)
        leader._followers += (variable,)
        return variable

    def _variable_class(self, owner: object, kwargs: Mapping[str, Any]) -> type:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return SequentialVariable
        is_state = isinstance(owner, (keras.Layer, keras.random.SeedGenerator))
        return SequentialVariable if is_state and not kwargs.get("trainable") else StageVariable

    def _variable_devices(self, variable_class: type) -> tuple[str, ...]:
        return (self._creation.device,)

    def _replica_ctx_update(
        self, var: Any, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> Any:
        if values_util.get_current_replica_id_as_int() != 0:
            return None  # replica 0 computes the same update, for all
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    # ---- how a step runs on replicas -------------------------------------------------------------

    def _device_of_stage(self, stage: int) -> str:
        return self._stage_devices[self._schedule.device_of[stage]]

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Any:
        """Notes the first rows of arrays; any other dataset would lose those that are looked at."""
        if isinstance(call.data_adapter, ArrayDataAdapter) and call.model not in self._batches:
            rows = min(call.data_adapter.batch_size, call.data_adapter._num_samples)
            rows = -(-rows // self._schedule.num_microbatches)
            x = keras.utils.unpack_x_y_sample_weight(call.data_adapter._inputs)[0]
            if all(isinstance(leaf, np.ndarray | tf.Tensor) for leaf in keras.tree.flatten(x)):
                first = keras.tree.map_structure(lambda leaf: tf.constant(leaf[:rows]), x)
                self._batches[call.model] = first
        return dataset

    def _note_batch(self, model: keras.Model, data: Any) -> None:
        """Notes zeros of the shapes of a batch of which no real rows are known."""
        if model in self._batches or model in self._known_stages:
            return
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        leaves = keras.tree.flatten(x)
        if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
            return
        num_rows = leaves[0].shape[0]
        rows = -(-num_rows // self._schedule.num_microbatches) if num_rows else ROWS
        with tf.init_scope():
            x = keras.tree.map_structure(lambda leaf: zeros_like_spec(leaf, rows), x)
            self._batches[model] = x

    def _stages_of(self, model: keras.Model) -> Stages:
        if model not in self._known_stages:
            _check_batch_norm(model)
            inputs = self._batches.get(model)
            stages = divide(model, self._partition, self._placement, self._budget, inputs)
            homes = stages.homes()
            for variable in model.variables:
                if isinstance(variable._value, StageVariable) and id(variable) in homes:
                    variable._value.move_to(self._device_of_stage(homes[id(variable)]))
            self._known_stages[model] = stages
            self._batches.pop(model, None)
        return self._known_stages[model]

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        stages = self._stages_of(model)
        deferred = DeferredBatchNorm(self._deferred_layers(model))
        if tf.executing_eagerly():
            yield
            return
        rematerialization = Rematerialization(self._options.rematerialize, self._schedule)
        rematerialization.check_names([part.name for part in stages.parts])
        hosts = self._hosts() if self._options.offload else None
        self._executor = executor = Executor(
            self._schedule, self._stage_devices, rematerialization, hosts
        )

        def current_microbatch() -> int | None:
            microbatch = values_util.get_current_replica_id_as_int()
            step = current_replica_step()
            if step is not None:
                deferred.shares[microbatch] = step.rows, step.weight
            return microbatch

        try:
            with staged(model, stages, executor, current_microbatch, deferred, rematerialization):
                yield
            deferred.assign()
            graph = tf.compat.v1.get_default_graph()
            executor.order(graph)
            if self._has_clock:
                self._times = executor.add_clock(graph, self._hosts())
        finally:
            self._executor = None

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
        all_layers = model._flatten_layers()
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
        step, executor = current_replica_step(), self._executor
        if step is None or executor is None:
            return super()._reduce_gradients(gradients)

        def merge(_: tf.distribute.Strategy, gradients: list, rows: Any) -> list:
            microbatches = range(self._num_replicas_in_sync)
            parts = [distribute_utils.select_replica(i, (gradients, rows)) for i in microbatches]
            return sum_gradients(executor, *zip(*parts, strict=True))

        context = distribute_lib.get_replica_context()
        return context.merge_call(merge, args=(gradients, step.rows))

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        if not isinstance(value, DistributedValues):
            return value
        return ReductionToOneDevice()._gather(value, destinations, axis, options)


def _all_devices() -> list[str]:
    gpus = tf.config.list_logical_devices("GPU")
    return [device.name for device in gpus or tf.config.list_logical_devices("CPU")]


def _budget(schedule: Schedule, memory_limit_bytes: int | None) -> Budget:
    """The stages of a device share its memory evenly."""
    if memory_limit_bytes is None:
        return Budget(simulate(schedule).peak_live_per_stage)
    stages_per_device = max(collections.Counter(schedule.device_of.values()).values())
    return Budget(simulate(schedule).peak_live_per_stage, memory_limit_bytes / stages_per_device)


def _check_schedule(schedule: Schedule, num_devices: int, num_microbatches: int | None) -> None:
    validate(schedule)
    if schedule.num_devices != num_devices:
        raise ValueError(
            f"A schedule must have as many devices as the strategy. Received: schedule "
            f"{schedule.name!r} of {schedule.num_devices} devices, {num_devices} devices."
        )
    if num_microbatches not in (None, schedule.num_microbatches):
        raise ValueError(
            f"A schedule holds the number of microbatches. Received: schedule {schedule.name!r} of "
            f"{schedule.num_microbatches} microbatches, num_microbatches={num_microbatches}."
        )


def _check_batch_norm(model: keras.Model) -> None:
    layers = [
        layer.name for layer in model._flatten_layers() if getattr(layer, "synchronized", False)
    ]
    if layers:
        raise ValueError(
            "BatchNormalization(synchronized=True) needs all rows of a batch at once, which the "
            f"microbatches of a pipeline never are. Received: layers {layers[:5]} of model "
            f"'{model.name}'. Use synchronized=False: each microbatch is then normalised by its "
            "own statistics."
        )
