"""What the user says of a pipeline, wherever it is on a mesh."""

from dataclasses import dataclass, replace

from tfparallel.checked_types import checks_types
from tfparallel.pipeline.plans.counts import check_choice, check_counts
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.schedules.registry import build_schedule
from tfparallel.pipeline.refusals import check_schedule
from tfparallel.pipeline.rematerialization import Choice, Rematerialization
from tfparallel.pipeline.stages import Partition
from tfparallel.segments.memory_policy import MemoryPolicy


@checks_types
@dataclass(frozen=True)
class PipelineOptions:
    """Options of a pipeline, as `PipelineStrategy` explains them.

    Attributes:
        num_microbatches, schedule, partition, chunks_per_device, memory_limit_bytes, batch_norm,
            rematerialize, offload, num_stages: the arguments of `PipelineStrategy`. On a mesh with
            an axis of data, `num_microbatches` is of each pipeline; `num_stages` is for a mesh
            whose one axis is the pipeline.
    """

    num_microbatches: int | None = None
    schedule: str | Schedule = "1f1b"
    partition: Partition = "balanced"
    chunks_per_device: int | None = None
    memory_limit_bytes: int | None = None
    batch_norm: str = "per_microbatch"
    rematerialize: Choice = "none"
    offload: bool = False
    num_stages: int | None = None

    def keeping(self, memory: MemoryPolicy | None) -> "PipelineOptions":
        """These options, of a pipeline that keeps what `memory` says.

        Raises:
            ValueError: if these options say so too, and for some layers to be offloaded.
        """
        if memory is None:
            return self
        if self.rematerialize != "none" or self.offload:
            raise ValueError(
                "What is kept is said once. Received: "
                f"memory={memory}, rematerialize={self.rematerialize!r} and "
                f"offload={self.offload}. Leave `memory` out, or both others."
            )
        if memory.offload not in ("none", "full"):
            raise ValueError(
                "What a stage keeps goes to the host as a whole. Received: "
                f"offload={memory.offload!r}. Say 'full' or 'none'."
            )
        offload = memory.offload == "full"
        return replace(self, rematerialize=memory.rematerialize, offload=offload)

    def schedule_for(self, num_devices: int) -> Schedule:
        """The order of passes on so many devices, once all options are checked for it.

        Raises:
            ValueError: for counts below 1, and for a schedule that is unknown, incomplete, would
                deadlock, or is for another number of devices.
        """
        schedule = self.schedule
        if isinstance(schedule, str):
            schedule = build_schedule(
                schedule, num_devices, self.num_microbatches, self.chunks_per_device
            )
        check_schedule(schedule, num_devices, self.num_microbatches)
        if self.memory_limit_bytes is not None:
            check_counts(memory_limit_bytes=self.memory_limit_bytes)
        if self.num_stages is not None:
            self._check_num_stages(schedule)
        check_choice("batch_norm", self.batch_norm, ("per_microbatch", "deferred"))
        Rematerialization(self.rematerialize, schedule)  # raises
        return schedule

    def _check_num_stages(self, schedule: Schedule) -> None:
        if schedule.num_stages != schedule.num_devices:
            raise ValueError(
                "With num_stages each stage has devices of its own. Received: "
                f"num_stages={self.num_stages} and schedule {schedule.name!r}, which has several "
                "stages on each device. Take another schedule, or leave num_stages out."
            )
        if self.partition != "balanced":
            raise ValueError(
                "With num_stages layers and devices of stages are chosen together, by "
                f"partition='balanced'. Received: partition={self.partition!r}. Leave one of both "
                "out; a stage of given layers has several devices where `devices` says so."
            )
