"""One step as it ran: a lane for each device and link, a box for what it does; the rest is idle.

    CPU:0          ccccccccccccccccccrrruuu
    CPU:1          ccccccccccccccccc....uuu
    CPU:1 > CPU:0  .................ss.....

As text, as a picture, and as a trace for chrome://tracing and https://ui.perfetto.dev.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

KINDS = ("compute", "send", "receive", "reduce", "update")
COLOURS = {
    "compute": "#5b8ff9",
    "send": "#b07aa1",
    "receive": "#d4a6c8",
    "reduce": "#e15759",
    "update": "#61b884",
}
_ROUNDING_S = 5e-7  # as much as two times of seconds since 1970 are wrong together
_LETTERS = {kind: kind[0] for kind in KINDS} | {"receive": "v"}


class DrawnStep(Protocol):
    """A measured step, which can be looked at: `StepLanes`, or the passes of a pipeline."""

    def text(self, width: int = 100) -> str:
        """The lanes as text of `width` columns, and figures."""

    def trace(self) -> dict[str, Any]:
        """The step in the Trace Event Format."""

    def save_trace(self, path: str | os.PathLike) -> None:
        """Writes `trace()` as JSON."""

    def save_png(self, path: str | os.PathLike) -> None:
        """Draws the lanes with matplotlib."""


class Box(NamedTuple):
    """What a device or link did for a while.

    Attributes:
        lane: its position among the lanes.
        kind: what for; one of `KINDS` of a step, a pass of a pipeline.
        label: what is written into it.
        start, end: seconds from the start of the step.
        details: for the trace.
    """

    lane: int
    kind: str
    label: str
    start: float
    end: float
    details: Mapping[str, Any] = {}


@dataclass(frozen=True)
class StepLanes:
    """One measured step; `print` it.

    Attributes:
        lanes: names of devices and links; of a job of several processes behind their ranks.
        boxes: in the order in which they start.
        seconds: of the step.
        clock_error_s: by how much clocks of hosts may differ after they were compared; 0 on one.
    """

    lanes: tuple[str, ...]
    boxes: tuple[Box, ...]
    seconds: float
    clock_error_s: float = 0.0

    def busy_s(self, kind: str | None = None) -> list[float]:
        """How long each lane was busy with `kind`, or with anything; what overlaps counts once."""
        return [
            _union((b.start, b.end) for b in self.boxes if b.lane == i and kind in (None, b.kind))
            for i in range(len(self.lanes))
        ]

    @property
    def idle_s(self) -> list[float]:
        """How long each lane did nothing."""
        return [self.seconds - busy for busy in self.busy_s()]

    def text(self, width: int = 100) -> str:
        """The lanes as text of `width` columns, and what each spent its time on."""
        margin = max(map(len, self.lanes), default=0) + 2
        columns = max(width - margin, 10)
        rows = [name.ljust(margin) + self._row(i, columns) for i, name in enumerate(self.lanes)]
        return "\n".join([*rows, *self._figures()])

    def _row(self, lane: int, columns: int) -> str:
        """For each column a letter for what took most of it, of what was not idle."""
        spent: list[dict[str, float]] = [{} for _ in range(columns)]
        column_s = self.seconds / columns
        for box in self.boxes:
            if box.lane == lane and column_s:
                first, last = (min(int(t / column_s), columns - 1) for t in (box.start, box.end))
                for i in range(first, last + 1):
                    within = min(box.end, (i + 1) * column_s) - max(box.start, i * column_s)
                    if within > _ROUNDING_S:
                        spent[i][box.kind] = spent[i].get(box.kind, 0.0) + within
        return "".join(_LETTERS[max(own, key=own.__getitem__)] if own else "." for own in spent)

    def __str__(self) -> str:
        return self.text()

    def _figures(self) -> list[str]:
        by_kind = {kind: self.busy_s(kind) for kind in KINDS}
        lines = [f"{self.seconds * 1e3:.1f} ms a step" + self._clock_words()]
        for i, (name, idle_s) in enumerate(zip(self.lanes, self.idle_s, strict=True)):
            own = {**{kind: each[i] for kind, each in by_kind.items()}, "idle": idle_s}
            shares = [f"{k} {s / self.seconds:.0%}" for k, s in own.items() if s > 0]
            lines.append(f"{name}: {', '.join(shares)}")
        letters = ", ".join(f"{letter} {kind}" for kind, letter in _LETTERS.items())
        return [*lines, f"({letters}, . idle)"]

    def _clock_words(self) -> str:
        return f", clocks to {self.clock_error_s * 1e3:.1f} ms" if self.clock_error_s else ""

    def trace(self) -> dict[str, Any]:
        """The step in the Trace Event Format, times in microseconds."""
        return trace_events(self.lanes, self.boxes)

    def save_trace(self, path: str | os.PathLike) -> None:
        """Writes `trace()` as JSON; the file is whole at any time, or not there."""
        save_json(self.trace(), path)

    def save_png(self, path: str | os.PathLike) -> None:
        """Draws the lanes with matplotlib.

        Raises:
            ImportError: without matplotlib.
        """
        title = f"{self.seconds * 1e3:.1f} ms a step{self._clock_words()}"
        meanings = {kind: kind for kind in KINDS}
        draw_lanes(self.lanes, self.boxes, COLOURS, meanings, title, path)


def lanes_of(
    lanes: Sequence[str], boxes: Iterable[Box], gap_s: float, clock_error_s: float = 0.0
) -> StepLanes:
    """Lanes on which boxes of one kind that follow each other within `gap_s` are one.

    Args:
        lanes: names.
        boxes: in any order, by any clock.
        gap_s: the longest pause that is not shown.
        clock_error_s: as `StepLanes`.
    """
    found: list[Box] = []
    last: dict[tuple[int, str], int] = {}
    ordered = sorted(boxes, key=lambda box: box.start)
    origin = ordered[0].start if ordered else 0.0
    for each in ordered:
        box = each._replace(start=each.start - origin, end=each.end - origin)
        key = (box.lane, box.kind)
        if key in last and box.start - found[last[key]].end <= gap_s:
            before = found[last[key]]
            found[last[key]] = before._replace(end=max(before.end, box.end))
        else:
            last[key] = len(found)
            found.append(box)
    seconds = max((box.end for box in found), default=0.0)
    return StepLanes(tuple(lanes), tuple(found), seconds, clock_error_s)


def text_lanes(lanes: Sequence[str], boxes: Iterable[Box], seconds: float, width: int) -> list[str]:
    """A line for each lane, with the labels of its boxes, as long as they took."""
    margin = max(map(len, lanes), default=0) + 2
    columns = max(width - margin, 10)
    scale = columns / seconds if seconds > 0 else 0.0
    rows = [["."] * columns for _ in lanes]
    for box in boxes:
        first = min(int(box.start * scale), columns - 1)
        last = max(first + 1, min(int(box.end * scale), columns))
        rows[box.lane][first:last] = box.label.ljust(last - first, "-")[: last - first]
    return [f"{name.ljust(margin)}{''.join(row)}" for name, row in zip(lanes, rows, strict=True)]


def trace_events(lanes: Sequence[str], boxes: Iterable[Box]) -> dict[str, Any]:
    """Lanes in the Trace Event Format, times in microseconds."""
    names: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": name}}
        for i, name in enumerate(lanes)
    ]
    events = [
        {
            "name": box.label,
            "cat": box.kind,
            "ph": "X",
            "pid": 0,
            "tid": box.lane,
            "ts": box.start * 1e6,
            "dur": (box.end - box.start) * 1e6,
            "args": dict(box.details),
        }
        for box in boxes
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def save_json(value: object, path: str | os.PathLike) -> None:
    """Writes JSON; the file is whole at any time, or not there."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, allow_nan=False))
    part.replace(target)


def draw_lanes(
    lanes: Sequence[str],
    boxes: Iterable[Box],
    colours: Mapping[str, str],
    meanings: Mapping[str, str],
    title: str,
    path: str | os.PathLike,
    with_labels: bool = False,
) -> None:
    """A picture of lanes, in milliseconds.

    Args:
        lanes: names.
        boxes: what is drawn.
        colours, meanings: of each kind.
        title: above it.
        path: of the PNG file.
        with_labels: whether labels are written into boxes.

    Raises:
        ImportError: without matplotlib.
    """
    figure_class = matplotlib_figure("Drawing a swimlane")
    figure = figure_class(figsize=(11, 1.3 + 0.55 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    drawn: dict[str, Any] = {}
    for box in boxes:
        (bar,) = axes.barh(
            box.lane,
            (box.end - box.start) * 1e3,
            left=box.start * 1e3,
            color=colours[box.kind],
            edgecolor="white",
            linewidth=0.5,
        )
        drawn.setdefault(meanings[box.kind], bar)
        if with_labels:
            middle = (box.start + box.end) / 2 * 1e3
            axes.text(middle, box.lane, box.label, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=9, loc="left")
    figure.legend(drawn.values(), drawn.keys(), loc="outside upper right", fontsize=8, ncols=5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)


def matplotlib_figure(what: str) -> Any:
    """The class of figures that need no screen.

    Args:
        what: needs it, for the message.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{what} needs matplotlib. Received: no matplotlib. Install tfparallel[plot], or "
            "print it instead."
        ) from error
    return Figure


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what at least one of the spans covers."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
