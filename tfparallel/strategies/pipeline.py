"""Pipeline parallel: layers on several devices, microbatches on their way through them.

A microbatch is a replica, over variables that exist once: the batch is split, each microbatch runs
the model's own `train_step`, and gradients are summed before the optimizer looks at them, as under
every data-parallel strategy. What is different is where a layer computes, and in which order.
"""

import contextlib
import itertools
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.pipeline.devices import stage_devices
from tfparallel.pipeline.extended import PipelineExtended
from tfparallel.pipeline.measured_step import measure_step
from tfparallel.pipeline.pipeline_options import PipelineOptions
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.rematerialization import Choice
from tfparallel.pipeline.remote_stages import StageCluster
from tfparallel.pipeline.replicated import (
    Stage,
    chosen_later,
    groups_of_stages,
    microbatches_of_each,
    pipelines_of,
)
from tfparallel.pipeline.stages import Partition, Stages
from tfparallel.pipeline.summary import Summary
from tfparallel.pipeline.swimlane import Swimlane
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.device_names import Devices
from tfparallel.replicas.reporting_scope import ReportingScope
from tfparallel.segments.memory_policy import MemoryPolicy


@checks_types
class PipelineStrategy(KerasStrategy):
    """Layers divided over devices; microbatches of every batch pass through them in a pipeline.

    Trains to the weights of one device. `batch_size` stays that of the whole batch: it is split
    into microbatches inside the step, of which every row counts once.

    Args:
        devices: names such as `["GPU:0", "GPU:1"]`, one for each stage, or how many; None takes all
            GPUs, or all logical CPUs. A stage that is slower than the others may have several
            devices, which take microbatches in turn: `["GPU:0", ["GPU:1", "GPU:2"], "GPU:3"]`. Each
            has a copy of the stage's weights. `num_stages` chooses which stage has several.
        num_microbatches: parts of a batch. Default: 4 for each stage, which leaves the devices idle
            for less than a fifth of the time. Numbers of devices of a stage must divide it.
        schedule: "1f1b" (default), "gpipe", "interleaved_1f1b" or "zero_bubble", or a
            `tfparallel.pipeline.plans.schedule.Schedule` of your own.
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
        memory: the same as a `tfparallel.MemoryPolicy`, instead of `rematerialize` and `offload`;
            its `offload` is "none" or "full" here. Layers made in a `keras.RematScope` are computed
            again whatever is said.
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` of a chief and workers:
            every process runs the same script, the first one trains, and in the others the
            constructor serves their stages until that is done and then ends the process with status
            0. Default: `TF_CONFIG`, where no devices are given and it has several tasks.
        insecure_network: says that strangers cannot reach the network between the processes. Needed
            for addresses other than loopback: TensorFlow's servers know no authentication.
        timeouts: how long processes wait for one another.
        num_stages: fewer stages than `devices`, or as many: then "balanced" chooses layers and
            devices of the stages together, by what it measures, so that the slowest stage is as
            fast as can be. A stage has as many devices as divide the number of pipelines, which is
            the most that a stage can have, or the next below that divides `num_microbatches`.
            Default: a stage for each of `devices`.

    Raises:
        ClusterConfigError: listing all that is wrong with `TF_CONFIG`.
        StageLost: from training, naming the stage whose process is gone or does not answer.
        TimeoutError: naming the processes that never came.
        ValueError: for addresses that other machines reach, for devices that do not exist or are
            named twice, counts below 1, a schedule that is unknown, incomplete or would
            deadlock, `memory` beside `rematerialize` or `offload`, or `num_stages` beside a
            partition, devices of stages, or processes.

    Source: GPipe, Huang et al., https://arxiv.org/abs/1811.06965; 1F1B: PipeDream-flush, Narayanan
    et al., https://arxiv.org/abs/2104.04473.
    """

    def __init__(
        self,
        devices: Devices | Sequence[Stage] | None = None,
        num_microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        partition: Partition = "balanced",
        *,
        chunks_per_device: int | None = None,
        memory_limit_bytes: int | None = None,
        batch_norm: str = "per_microbatch",
        rematerialize: Choice = "none",
        offload: bool = False,
        memory: MemoryPolicy | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        insecure_network: bool = False,
        timeouts: Timeouts | None = None,
        num_stages: int | None = None,
    ):
        groups = None if devices is None else groups_of_stages(devices)
        names, cluster = stage_devices(
            None if groups is None else list(itertools.chain(*groups)),
            cluster_resolver,
            insecure_network,
            timeouts or Timeouts(),
        )
        stages = groups or [[name] for name in names]
        later = None
        if num_stages is not None:
            _check_is_one_process(num_stages, cluster)
            later = chosen_later(stages, num_stages, num_microbatches)
        first, *others = pipelines_of(stages) if later is None else later.before
        options = PipelineOptions(
            microbatches_of_each(num_microbatches, stages, 1 + len(others))
            if later is None
            else later.num_microbatches,
            schedule,
            partition,
            chunks_per_device,
            memory_limit_bytes,
            batch_norm,
            rematerialize,
            offload,
            num_stages,
        ).keeping(memory)
        schedule = options.schedule_for(len(first))
        super().__init__(
            PipelineExtended(
                self, first, schedule, options, cluster, others, later, in_turn=bool(others)
            )
        )

    extended: PipelineExtended

    def scope(self) -> contextlib.AbstractContextManager:
        """`tf.distribute.Strategy.scope`; errors within it name a stage whose process is lost."""
        reports = self.extended._reports_lost_stages()
        return super().scope() if reports is None else ReportingScope(super().scope(), reports)

    @property
    def schedule(self) -> Schedule:
        """The order of passes on each device; of several for a stage, those of the first."""
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
        return self.extended._summary_of(model)

    def profile(self, model: keras.Model, batch: object) -> Swimlane:
        """Measures when each pass of a training step starts and ends.

        `print` the result, or `save_png` or `save_trace` it. Two steps run, of which the second is
        measured; then all that they changed is put back: variables, losses, attributes of layers,
        random numbers. On a GPU a pass may end when its kernels are launched, before they have run.

        Args:
            model: compiled under this strategy.
            batch: `(x, y)` or `(x, y, sample_weight)`, arrays or tensors.

        Raises:
            ValueError: for a model that is not compiled, or not this strategy's.
        """
        return measure_step(self, model, batch)


def _check_is_one_process(num_stages: int, cluster: StageCluster | None) -> None:
    if cluster is not None:
        raise ValueError(
            "Which stage has several devices is chosen of devices of one process. Received: "
            f"num_stages={num_stages}, and a cluster of several tasks. Leave num_stages out."
        )
