"""What the devices of several pipelines do, as orders of one: pipelines may have devices in common.

    stage     0        1        2
    pipeline  A        B        D       microbatches 0, 1
    pipeline  A        C        D       microbatches 2, 3

    A         F0 F2 ...                 takes those of both pipelines in turn
    B         F0 ...
    C            F2 ...

Which of two pipelines a device that they share takes first is TensorFlow's to say; here they take
turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.orders import Orders
from tfparallel.pipeline.plans.schedule import Schedule


@dataclass(frozen=True)
class PipelinesTogether(Orders):
    """For every device of several pipelines, its actions in order.

    A stage may be on several devices, for different microbatches.

    Attributes:
        devices: names of the devices.
    """

    devices: tuple[str, ...] = ()

    @cached_property
    def _device_of_action(self) -> dict[Action, int]:
        return {action: i for i, order in enumerate(self.orders) for action in order}

    def device_that_runs(self, action: Action) -> int:
        """The device of an action's stage in its microbatch's pipeline."""
        return self._device_of_action[action]


def pipelines_together(schedule: Schedule, pipelines: Sequence[Sequence[str]]) -> PipelinesTogether:
    """The orders of all devices of pipelines that each carry out `schedule`.

    Args:
        schedule: of each pipeline.
        pipelines: for each the device of each of the schedule's devices. Microbatches of all are
            numbered one pipeline after the other.
    """
    names = [name for each in pipelines for name in each]
    if len(set(names)) < len(names):  # those of a stage are beside one another
        names = list(dict.fromkeys(name for place in zip(*pipelines) for name in place))
    orders: list[list[Action]] = [[] for _ in names]
    for action in schedule.steps():
        for i, pipeline in enumerate(pipelines):
            own = action._replace(microbatch=i * schedule.num_microbatches + action.microbatch)
            orders[names.index(pipeline[schedule.device_of[action.stage]])].append(own)
    return PipelinesTogether(schedule.name, orders, tuple(names))
