"""What is told of one epoch, or of a whole training: one line of JSON."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfparallel.measure.shares import CATEGORIES

MANY_TRACES = 2  # more are no beginning any more
_SMOOTHED = ("noise",)  # of all epochs until then: the last one has the most


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

    @property
    def flops_per_s(self) -> float | None:
        """Floating-point operations that the model needs, over the wall time; None if unknown."""
        use = self.details.get("use")
        speed = self.rows_per_s
        return None if use is None or speed is None else speed * use["flops_per_row"]

    @property
    def mfu(self) -> float | None:
        """Of what the devices could do in this time, the part that the model needed."""
        done = self.flops_per_s
        return None if done is None else done / self.details["use"]["peak_flops_per_s"]

    def share(self, category: str) -> float:
        """The part of the wall time that went into a category."""
        return self.seconds[category] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Of all categories; they sum to 1."""
        return {category: self.share(category) for category in CATEGORIES}

    @property
    def once_s(self) -> float:
        """Seconds of tracing that a training pays once, however long it is."""
        is_once = self.details.get("traces", 0) <= MANY_TRACES
        return self.seconds["tracing"] if is_once else 0.0

    def as_dict(self) -> dict[str, Any]:
        """What a line of JSON holds."""
        own = dataclasses.asdict(self)
        return {**own, "rows_per_s": self.rows_per_s, "shares": self.shares, "mfu": self.mfu}


def whole_training(records: Sequence[Record]) -> Record:
    """A training, of its epochs and what came after them.

    Args:
        records: at least one, in order.
    """
    wall_s = sum(each.wall_s for each in records)
    rows = [each.rows for each in records]
    first = records[0]
    return Record(
        None,
        sum(each.steps for each in records),
        None if any(each is None for each in rows) else sum(each or 0 for each in rows),
        wall_s,
        added(*(each.seconds for each in records)),
        _steps_of_all(records),
        {
            name: sum(each.utilisation.get(name, 0.0) * each.wall_s for each in records) / wall_s
            for name in first.utilisation
        },
        _details_of_all(records),
        first.rank,
    )


def _steps_of_all(records: Sequence[Record]) -> StepTimes:
    slowest = max(records, key=lambda each: each.step.slowest).step
    medians = sorted((each.step.median, each.steps) for each in records if each.steps)
    usual = medians[len(medians) // 2][0] if medians else 0.0
    p95 = max(each.step.p95 for each in records)
    return dataclasses.replace(slowest, median=usual, p95=p95)


def _details_of_all(records: Sequence[Record]) -> dict[str, Any]:
    latest = {
        name: each.details[name] for each in records for name in _SMOOTHED if name in each.details
    }
    return {
        **records[0].details,
        **latest,
        **_slowest(records),
        "traces": sum(each.details["traces"] for each in records),
        "bytes_sent": sum(each.details["bytes_sent"] for each in records),
        "collectives_s": sum(each.details["collectives_s"] for each in records),
        "callbacks_s": added(*(each.details["callbacks_s"] for each in records)),
        "saving_s": added(*(each.details["saving_s"] for each in records)),
        "iterators_s": sum(each.details["iterators_s"] for each in records),
        "python_s": sum(each.details["python_s"] for each in records),
        "input_stage": records[-1].details["input_stage"],
    }


def _slowest(records: Sequence[Record]) -> dict[str, str]:
    """The rank or stage that was waited for longest; nothing where there is one."""
    waited_s = added(
        *(
            {each.details["slowest"]: each.seconds["imbalance"]}
            for each in records
            if "slowest" in each.details
        )
    )
    return {"slowest": max(waited_s, key=waited_s.__getitem__)} if waited_s else {}


def added(*tables: Mapping[str, float]) -> dict[str, float]:
    """Sums by name, over all tables that have it."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: sum(table.get(key, 0.0) for table in tables) for key in keys}
