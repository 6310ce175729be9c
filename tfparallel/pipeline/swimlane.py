"""One step of a pipeline as it ran: a lane for each device, a box for each pass.

    device CPU:0  F0 F1 F2 ..... B0- F3 B1- ..
    device CPU:1  .. F0 F1 B0- F2 B1- .. B2-

As text, as a picture, and as a trace for chrome://tracing and https://ui.perfetto.dev.
"""

import collections
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tfparallel.measure.lanes import Box, draw_lanes, save_json, text_lanes, trace_events
from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.orders import Orders
from tfparallel.pipeline.plans.simulation import Event, Timeline, simulate

_OF_GPUS = "GPU: by the host's clock; a pass may end where it is launched, before it has run"
_LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
_COLOURS = {
    "forward": "#5b8ff9",
    "backward": "#f6a04d",
    "backward_input": "#f6a04d",
    "backward_weight": "#61b884",
}
_MEANINGS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, input",
    "backward_weight": "backward, weights",
}


@dataclass(frozen=True)
class Swimlane:
    """One measured step; `print` it.

    Attributes:
        timeline: the passes, in seconds from the start of the first one.
        devices: the name of each of the schedule's devices.
    """

    timeline: Timeline
    devices: tuple[str, ...]

    @cached_property
    def ideal(self) -> Timeline:
        """The schedule with passes as long as measured (medians), and no other delay."""
        durations: dict[tuple, list[float]] = collections.defaultdict(list)
        for event in self.timeline.events:
            durations[event.action.stage, event.action.kind].append(event.end - event.start)
        schedule = self.timeline.schedule
        times: dict[str, Any] = {
            f"{kind}_time": [
                statistics.median(durations[stage, kind] or [0.0])
                for stage in range(schedule.num_stages)
            ]
            for kind in _LETTERS
        }
        return simulate(schedule, **times)

    def text(self, width: int = 100) -> str:
        """The lanes as text of `width` columns, and what share of the time was idle."""
        lanes = text_lanes(self.devices, self._boxes(), self.timeline.makespan, width)
        return "\n".join([*lanes, *self._figures()])

    def __str__(self) -> str:
        return self.text()

    def _figures(self) -> list[str]:
        busy = ", ".join(
            f"{name} {share:.0%}" for name, share in zip(self.devices, self.timeline.utilisation)
        )
        return [
            f"{self.timeline.schedule.name}: {self.timeline.makespan * 1e3:.1f} ms, busy: {busy}",
            f"bubble {self.timeline.bubble_fraction:.0%}, "
            f"of passes as long as these without any delay {self.ideal.bubble_fraction:.0%}",
            *([_OF_GPUS] if any("GPU" in name for name in self.devices) else []),
        ]

    def _boxes(self) -> list[Box]:
        return [
            Box(
                event.device,
                event.action.kind,
                f"{_LETTERS[event.action.kind]}{event.action.microbatch}",
                event.start,
                event.end,
                event.action._asdict(),
            )
            for event in self.timeline.events
        ]

    def trace(self) -> dict[str, object]:
        """The step in the Trace Event Format, times in microseconds."""
        return trace_events(self.devices, self._boxes())

    def save_trace(self, path: str | os.PathLike) -> None:
        """Writes `trace()` as JSON; the file is whole at any time, or not there."""
        save_json(self.trace(), path)

    def save_png(self, path: str | os.PathLike) -> None:
        """Draws the lanes with matplotlib.

        Raises:
            ImportError: without matplotlib.
        """
        boxes = [box._replace(label=str(box.details["microbatch"])) for box in self._boxes()]
        title = "\n".join(self._figures())
        draw_lanes(self.devices, boxes, _COLOURS, _MEANINGS, title, path, with_labels=True)


def swimlane(
    schedule: Orders, times_s: Mapping[Action, Sequence], devices: Sequence[str]
) -> Swimlane:
    """The swimlane of what was measured.

    Args:
        schedule: that was carried out.
        times_s: when each pass started and ended, by any clock.
        devices: names of the schedule's devices.
    """
    origin = min(start for start, _ in times_s.values())
    events = [
        Event(action, schedule.device_that_runs(action), float(start - origin), float(end - origin))
        for action, (start, end) in times_s.items()
    ]
    events.sort(key=lambda event: event.start)
    return Swimlane(Timeline(schedule, tuple(events)), tuple(devices))
