"""What is told of one epoch, or of a whole training: one line of JSON."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfparallel.measure.shares import CATEGORIES


@dataclass(frozen=True)
class StepTimes:
    """How long steps took, in seconds; those that traced are left out where there are others.

    Attributes:
        median, p95, slowest: of the steps.
        slowest_step: its number in the epoch, from 0.
        slowest_because: what took the time in it.
    """

    median: float = 0.0
    p95: float = 0.0
    slowest: float = 0.0
    slowest_step: int = 0
    slowest_because: str = ""


def step_times(times_s: Sequence[float], because: str = "") -> StepTimes:
    """The figures of steps that took so long.

    Args:
        times_s: of all steps, in order.
        because: what took the time in the slowest one.
    """
    if not times_s:
        return StepTimes()
    slowest = max(range(len(times_s)), key=times_s.__getitem__)
    ordered = sorted(times_s)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return StepTimes(statistics.median(ordered), p95, times_s[slowest], slowest, because)


@dataclass(frozen=True)
class Record:
    """One epoch, or a whole training.

    Attributes:
        epoch: from 0; None of a whole training.
        steps: how many.
        rows: that all replicas have had together; None where that is not known.
        wall_s: how long it took.
        seconds: by category; they sum to `wall_s`.
        step: how long steps took.
        utilisation: the share of the wall time in which a device computes, by its name.
        details: names and figures behind the seconds: callbacks by name, the slowest stage or
            rank, bytes sent, traces.
        rank: of the process that tells.
    """

    epoch: int | None
    steps: int
    rows: int | None
    wall_s: float
    seconds: Mapping[str, float]
    step: StepTimes = StepTimes()
    utilisation: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0

    @property
    def rows_per_s(self) -> float | None:
        """Samples per second, over the wall time."""
        return None if self.rows is None or self.wall_s <= 0 else self.rows / self.wall_s

    def share(self, category: str) -> float:
        """The part of the wall time that went into a category."""
        return self.seconds[category] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Of all categories; they sum to 1."""
        return {category: self.share(category) for category in CATEGORIES}

    def as_dict(self) -> dict[str, Any]:
        """What a line of JSON holds."""
        own = dataclasses.asdict(self)
        return {**own, "rows_per_s": self.rows_per_s, "shares": self.shares}
