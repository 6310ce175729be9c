"""Which level of compression each bucket gets, decided from measured times and errors.

Plain Python: no tensor, no device. Levels are numbers, from exact to coarse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MEASURED_STEPS = 3  # with each level for all buckets; the fastest counts
TURNS = 5  # of a plan and of the fastest level
_TOLERANCE = 0.03  # of the fastest step: so much longer may it be for a more exact gradient
_CHANGE = 1.5  # times that differ by more than this factor are measured again


def finish_time_s(ready_s: Sequence[float], durations_s: Sequence[float]) -> float:
    """When the last bucket is reduced, if each begins once it is ready and the one before is done.

    Args:
        ready_s: when each bucket's gradients are computed, in the order of reduction.
        durations_s: what compressing, sending and decompressing each takes.
    """
    done = 0.0
    for ready, duration in zip(ready_s, durations_s, strict=True):
        done = max(done, ready) + duration
    return done


def choose_levels(
    ready_s: Sequence[float],
    durations_s: np.ndarray,
    errors: np.ndarray,
    max_error: float,
    step_s: float,
) -> list[int]:
    """The most exact levels with which communication hides as well as it can.

    First every bucket gets its fastest level of those whose error is allowed. Then, beginning with
    the bucket that has the most time left, each gets the most exact level that does not make the
    step longer, but for 3 %.

    Args:
        ready_s: as in `finish_time_s`.
        durations_s: `[bucket, level]`.
        errors: `[bucket, level]`; level 0 has none.
        max_error: the largest error that is allowed.
        step_s: how long a whole step takes with level 0 for all.
    """
    buckets = range(len(ready_s))
    allowed = [np.flatnonzero(errors[k] <= max_error) for k in buckets]
    levels = [int(min(allowed[k], key=lambda level: durations_s[k, level])) for k in buckets]

    def finish(levels: list[int]) -> float:
        return finish_time_s(ready_s, [durations_s[k, levels[k]] for k in buckets])

    # What a step takes besides: until the first bucket is ready, and after the last is reduced.
    rest_s = max(0.0, step_s - finish([0 for _ in buckets]))
    limit = finish(levels) + _TOLERANCE * (finish(levels) + rest_s)
    for k in buckets:
        for level in sorted(allowed[k], key=lambda level: errors[k, level]):
            changed = [*levels[:k], int(level), *levels[k + 1 :]]
            if errors[k, level] < errors[k, levels[k]] and finish(changed) <= limit:
                levels = changed
                break
    return levels


@dataclass(frozen=True)
class Measurement:
    """One step as all ranks saw it.

    Attributes:
        ready_s, done_s: `[rank, bucket]`, by each rank's own clock.
        errors: `[rank, bucket, level]`, of a probing step; zeros otherwise.
    """

    ready_s: np.ndarray
    done_s: np.ndarray
    errors: np.ndarray

    def durations_s(self) -> np.ndarray:
        """`[bucket]`: of the rank that came last, for the others also waited for it.

        A bucket's second round shares a collective with the next bucket's first: where the network
        is faster than the backward pass, its time holds the waiting for that one.
        """
        # One may be decompressed before an earlier one is: then it took no time of its own.
        done_s = np.maximum.accumulate(self.done_s, axis=1)
        before = np.concatenate([self.ready_s[:, :1], done_s[:, :-1]], 1)
        return np.min(done_s - np.maximum(self.ready_s, before), 0)

    def offsets_s(self) -> np.ndarray:
        """`[bucket]`: when each was ready, after the first, on the slowest rank."""
        return np.max(self.ready_s - self.ready_s[:, :1], 0)


@dataclass
class Controller:
    """Says, step by step, which level each bucket gets, and when it wants to see times again.

    A round of measurements runs each of the measured levels for a few steps, then one probing step
    that also estimates errors; then it plans. A plan is a forecast: unless it is known to be as
    fast as the fastest measured level for all buckets, it takes turns with that for a few steps,
    and the faster one stays. After `interval` steps it looks at one step and probes once more: it
    measures everything anew if times have changed, and plans again if they have not.

    Args:
        num_buckets: how many there are.
        names: of the levels, from exact to coarse.
        measured: the levels that are timed; what is between the last two is interpolated.
        probe: the number that stands for a probing step; it is timed like no level.
        max_error: see `choose_levels`.
        interval: steps between two decisions.

    Attributes:
        bytes_shares: `[bucket, level]`, what a level sends over what level 0 sends; zeros where
            that is not known.
        log: decisions, with the times and errors that they were taken from.
    """

    num_buckets: int
    names: Sequence[str]
    measured: Sequence[int]
    probe: int
    max_error: float
    interval: int
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bytes_shares = np.zeros((self.num_buckets, len(self.names)))
        self._running: list[int] = []  # the levels of the step that is measured next
        self._queue: list[list[int]] = []  # and of those after it
        self._measurements: dict[tuple[int, ...], list[Measurement]] = {}
        self._steps_s: dict[tuple[int, ...], list[float]] = {}  # whole steps of these levels
        self._end_s = np.empty(0)  # `[rank]`: of the step before
        self._candidates: list[list[int]] = []  # that take turns
        self._is_settled = False
        self._durations_s = np.empty(0)
        self._steps = 0

    def advance(self, measurement: Measurement) -> tuple[list[int], int]:
        """What follows the step that was measured.

        Returns:
            The levels of the buckets, and after how many steps to be called again.
        """
        end_s, before_s = np.max(measurement.done_s, 1), self._end_s
        self._end_s = end_s
        if not self._running:  # the first step of all: its times hold tracing and connecting
            return self._measure_all()
        if self._is_settled:
            return self._look(measurement)
        levels = tuple(self._running)
        self._measurements.setdefault(levels, []).append(measurement)
        self._steps_s.setdefault(levels, []).append(float(np.max(end_s - before_s)))
        if self._queue:
            return self._next()
        return self._compare() if self._candidates else self._plan()

    def _measure_all(self) -> tuple[list[int], int]:
        self._durations_s = np.empty(0)
        levels = [level for level in self.measured for _ in range(MEASURED_STEPS)]
        return self._run([self._for_all(level) for level in [*levels, self.probe]])

    def _run(self, steps: list[list[int]]) -> tuple[list[int], int]:
        self._queue, self._is_settled = steps, False
        self._measurements, self._steps_s = {}, {}
        return self._next()

    def _next(self) -> tuple[list[int], int]:
        self._running = self._queue.pop(0)
        self._steps += 1
        return self._running, 1

    def _look(self, measurement: Measurement) -> tuple[list[int], int]:
        """At a step as it was decided, one interval later."""
        expected = sum(self._durations_s[k, level] for k, level in enumerate(self._running))
        received = float(np.sum(measurement.durations_s()))
        if not expected / _CHANGE < received < expected * _CHANGE:
            self._say(f"communication took {received:.4f} s instead of {expected:.4f} s: measures")
            return self._measure_all()
        return self._run([self._for_all(self.probe)])

    def _plan(self) -> tuple[list[int], int]:
        (probing,) = self._measurements[tuple(self._for_all(self.probe))]
        self._errors = np.max(probing.errors, 0)
        if not len(self._durations_s):
            self._durations_s = self._times_of_levels()
            exact = self._measurements[tuple(self._for_all(self.measured[0]))]
            self._ready_s = np.median([m.offsets_s() for m in exact], 0)
            self._steps_for_all_s = {n: self._step_s(self._for_all(n)) for n in self.measured}
        steps_s = self._steps_for_all_s
        plan = choose_levels(
            self._ready_s, self._durations_s, self._errors, self.max_error, steps_s[0]
        )
        allowed = [n for n in self.measured if np.max(self._errors[:, n]) <= self.max_error]
        fastest = min(allowed, key=steps_s.__getitem__)
        plan_s = steps_s.get(plan[0], np.inf) if len(set(plan)) == 1 else np.inf
        if plan_s <= (1 + _TOLERANCE) * steps_s[fastest]:
            return self._settle(plan)
        self._candidates = [plan, self._for_all(fastest)]
        return self._run(self._candidates * TURNS)

    def _compare(self) -> tuple[list[int], int]:
        plan, fastest = self._candidates
        self._candidates = []
        plan_s, fastest_s = self._step_s(plan), self._step_s(fastest)
        if plan_s <= (1 + _TOLERANCE) * fastest_s:
            return self._settle(plan)
        planned = ", ".join(self.names[level] for level in plan)
        self._say(f"{planned} took {1e3 * plan_s:.1f} ms a step, not {1e3 * fastest_s:.1f} ms")
        return self._settle(fastest)

    def _settle(self, levels: list[int]) -> tuple[list[int], int]:
        for k, level in enumerate(levels):
            options = ", ".join(
                f"{name} {1e3 * time:.1f} ms, error {error:.3g}"
                for name, time, error in zip(
                    self.names, self._durations_s[k], self._errors[k], strict=True
                )
            )
            self._say(f"bucket {k} is sent as {self.names[level]} (of: {options})")
        self._running, self._is_settled = levels, True
        self._steps += self.interval
        return levels, self.interval

    def _for_all(self, level: int) -> list[int]:
        return [level] * self.num_buckets

    def _step_s(self, levels: list[int]) -> float:
        return float(np.median(self._steps_s[tuple(levels)]))

    def _times_of_levels(self) -> np.ndarray:
        """`[bucket, level]`."""
        durations = np.empty((self.num_buckets, len(self.names)))
        for level in self.measured:
            measurements = self._measurements[tuple(self._for_all(level))]
            durations[:, level] = min((m.durations_s() for m in measurements), key=np.sum)
        first, last = self.measured[-2:]
        for level in range(first + 1, last):
            share = (level - first) / (last - first)
            durations[:, level] = (1 - share) * durations[:, first] + share * durations[:, last]
        # A level computes more than level 0, and its bytes need their time: what looks faster has
        # left its time to a neighbour.
        return np.maximum(durations, self.bytes_shares * durations[:, :1])

    def _say(self, text: str) -> None:
        self.log.append(f"step {self._steps}: {text}")
