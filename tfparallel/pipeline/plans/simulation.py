"""When each action of a schedule would run, given how long actions take."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.orders import Orders

Times = float | Sequence[float]  # one for all stages, or one per stage


class Event(NamedTuple):
    """One action as it ran: on which device, from when to when."""

    action: Action
    device: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule runs.

    Attributes:
        schedule: what runs.
        events: one per action, in an order that respects all dependencies.
    """

    schedule: Orders
    events: tuple[Event, ...]

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end, in the unit of the given times."""
        return max(event.end for event in self.events)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """For each device, the share of the makespan in which it computes.

        Passes that a device runs at once, as a CPU may, count once.
        """
        busy = [0.0] * self.schedule.num_devices
        done = [0.0] * self.schedule.num_devices
        for event in sorted(self.events, key=lambda event: event.start):
            busy[event.device] += max(event.end - max(event.start, done[event.device]), 0.0)
            done[event.device] = max(event.end, done[event.device])
        return tuple(time / self.makespan for time in busy)

    @property
    def bubble_fraction(self) -> float:
        """The share of all devices' time that is idle (the papers' bubble over the makespan)."""
        return 1 - sum(self.utilisation) / self.schedule.num_devices

    @property
    def peak_live_per_stage(self) -> tuple[int, ...]:
        """For each stage, the most microbatches whose activations it holds at once.

        Activations live from the start of the forward pass to the end of the backward pass (of
        its second half where it is split). A device runs one action at a time, so the peak
        depends on the order of actions only, not on the times.
        """
        peaks = self._peak_live(lambda event: event.action.stage)
        return tuple(peaks[stage] for stage in range(self.schedule.num_stages))

    @property
    def peak_live_per_device(self) -> tuple[int, ...]:
        """As `peak_live_per_stage`, counting all stages of a device together."""
        peaks = self._peak_live(lambda event: event.device)
        return tuple(peaks[device] for device in range(self.schedule.num_devices))

    def _peak_live(self, place_of: Callable[[Event], int]) -> Counter[int]:
        live: Counter[int] = Counter()
        peaks: Counter[int] = Counter()
        for event in self.events:
            place = place_of(event)
            live[place] += event.action.kind == "forward"
            peaks[place] = max(peaks[place], live[place])
            live[place] -= event.action.kind in ("backward", "backward_weight")
        return peaks


def simulate(
    schedule: Orders,
    forward_time: Times = 1.0,
    backward_time: Times = 2.0,
    backward_input_time: Times | None = None,
    backward_weight_time: Times | None = None,
    communication_time: float = 0.0,
) -> Timeline:
    """Run a schedule on paper: every device runs its order as early as dependencies allow.

    All times are in one unit, any. Each is one number for all stages or a sequence with one
    number per stage.

    Args:
        schedule: what to run; for one of your own, call `validate` first.
        forward_time: of a forward pass.
        backward_time: of a whole backward pass. Default: twice a forward pass, since it makes two
            products of matrices for each one of the forward pass.
        backward_input_time: of the first half of a split backward pass. Default: half of
            `backward_time`.
        backward_weight_time: of its second half. Default: half of `backward_time`.
        communication_time: from the end of an action to the moment when another device has its
            result. Neither device is busy meanwhile, as when copies overlap with computation.

    Raises:
        ValueError: if a time is negative or not finite, if there is not one per stage, or if the
            devices wait for one another in a circle.
    """
    num_stages = schedule.num_stages
    backward = _per_stage("backward_time", backward_time, num_stages)
    half = [time / 2 for time in backward]
    if backward_input_time is None:
        backward_input_time = half
    if backward_weight_time is None:
        backward_weight_time = half
    durations = {
        "forward": _per_stage("forward_time", forward_time, num_stages),
        "backward": backward,
        "backward_input": _per_stage("backward_input_time", backward_input_time, num_stages),
        "backward_weight": _per_stage("backward_weight_time", backward_weight_time, num_stages),
    }
    (hop,) = _per_stage("communication_time", communication_time, 1)

    events: dict[Action, Event] = {}
    free = [0.0] * schedule.num_devices  # when each device is done with its last action
    for action in schedule.steps():
        device = schedule.device_that_runs(action)
        needed = [events[dependency] for dependency in schedule.dependencies(action)]
        arrivals = [event.end + (hop if event.device != device else 0) for event in needed]
        start = max([free[device], *arrivals])
        free[device] = start + durations[action.kind][action.stage]
        events[action] = Event(action, device, start, free[device])
    return Timeline(schedule, tuple(events.values()))


def _per_stage(name: str, times: Times, num_stages: int) -> list[float]:
    times = [*times] if isinstance(times, Sequence) else [times] * num_stages
    if len(times) != num_stages:
        raise ValueError(
            f"{name} must be one number, or one per stage ({num_stages}). "
            f"Received: {len(times)} numbers."
        )
    if not all(math.isfinite(time) and time >= 0 for time in times):
        raise ValueError(f"{name} must be finite and not negative. Received: {name}={times}.")
    return times
