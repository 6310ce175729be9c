"""Which level of compression each bucket gets, decided from measured times and errors.

Plain Python: no tensor, no device. Levels are numbers, from exact to coarse.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tfparallel.communication.compression.level_costs import (
    choose_levels,
    finish_time_s,
    price_s,
    worth,
)

MEASURED_STEPS = 3  # with each level for all buckets; the median counts
TURNS = 5  # of a plan, the best level for all buckets, and exact steps
MOST_ROWS = 3 * TURNS  # steps of an order, unless all are alike
FIRST_PAYLOAD_BYTES, MOST_PAYLOAD_BYTES = 1 << 15, 1 << 23
_MORE = 4  # times a payload that was too small to tell anything
_WORTH_PAYLOADS = 8  # of the first: what has less to send tries that instead
_SEEN_S = 0.01  # what a payload has to take at least, beyond the smallest message
FIRST_LOOK = 50  # steps; each interval after it is twice as long
_TOLERANCE = 0.03  # of what the best costs: within it a forecast is believed
_LUCK = 2.0  # how much faster exact sums may be than payloads were
_HOPELESS = 1.5  # times the best price: what costs so much at the least is not tried
_CHANGE = 1.5  # times that differ by more than this factor are measured again


class Order(NamedTuple):
    """What follows.

    Attributes:
        rows: the levels of the buckets, step by step, again and again; up to `MOST_ROWS` steps,
            any number if there is one row.
        steps: after which the controller is asked again.
        payload_bytes: what ranks send one another before it is, to see how long bytes take.
    """

    rows: list[list[int]]
    steps: int = 1
    payload_bytes: int = 0


@dataclass(frozen=True)
class Measurement:
    """The steps of an order as all ranks saw them, each by its own clock.

    Attributes:
        ready_s, done_s: `[rank, bucket]`, of the last step.
        errors: `[rank, bucket, level]`, of a probing step; zeros otherwise.
        energies: `[rank, bucket]`, as in `worth`, of a probing step; zeros otherwise.
        began_s: `[rank]`: when the order was there; zeros for the first.
        ends_s: `[rank, steps]`: when the sums of the last steps were there, `MOST_ROWS` at most.
        trip_s, payload_s: `[rank]`: what the smallest message and the payload took.
    """

    ready_s: np.ndarray
    done_s: np.ndarray
    errors: np.ndarray
    energies: np.ndarray
    began_s: np.ndarray
    ends_s: np.ndarray
    trip_s: np.ndarray
    payload_s: np.ndarray

    def steps_s(self, steps: int) -> list[float]:
        """What the last `steps` steps took, of which the first followed the order at once."""
        ends_s = self.ends_s[:, -steps:]
        return np.max(np.diff(ends_s, prepend=self.began_s[:, None]), 0).tolist()

    @property
    def all_s(self) -> float:
        """What all steps of the order took."""
        return float(np.max(self.ends_s[:, -1] - self.began_s))

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


Steps = Generator[Order, Measurement, None]


@dataclass
class Controller:
    """Says, step by step, which level each bucket gets, and when it wants to see times again.

    It times the finest of the approximate levels for a few steps and estimates errors in one
    probing step. Of what was never timed it hopes for the best: it plans, and times what the plan
    uses, until all of it is known. Over a slow link one exact step takes as long as twenty
    approximate ones: before, payloads show what bytes take, larger and larger ones until they do.
    What is then hopeless for all is never tried for all, though a plan may use it where there is
    little to send. A plan is a forecast: unless it is known to be as good as the best level for all
    buckets, it takes turns with that for a few steps, once, and the better one stays. So it does
    with exact steps, which lose nothing, unless these are hopeless: three steps of a busy machine
    tell no tenth of a step. After `FIRST_LOOK` steps, and then twice as many each time up to
    `interval`, it looks at one step, and at two more if that took another time than expected: it
    measures everything anew if times have changed, and probes and plans again if they have not.

    Args:
        num_buckets: how many there are.
        names: of the levels, from exact to coarse; those from 2 on are approximate.
        measured: the levels that are timed; what is between the last two is interpolated.
        probe: the number that stands for a probing step; it is timed like no level.
        max_error: see `choose_levels`.
        interval: the most steps between two decisions.

    Attributes:
        sent_bytes: `[bucket, level]`; zeros where that is not known.
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
        self.sent_bytes = np.zeros((self.num_buckets, len(self.names)))
        self._finest = min([n for n in self.measured if n > 1], default=self.measured[-1])
        self._measurements: dict[int, list[Measurement]] = {}  # of a level for all buckets
        self._steps_s: dict[int, list[float]] = {}  # whole steps of these
        self._turns_s: dict[tuple[int, ...], float] = {}  # medians of plans that were tried
        self._byte_s = 0.0  # of what is sent exactly, at least
        self._payload_bytes = 0  # of the next look, until one has told what bytes take
        self._steps = 0
        self._life = self._live()
        self.order = next(self._life)

    def advance(self, measurement: Measurement) -> Order:
        """What follows the steps that were measured; the first one was `order`, as it is made."""
        if self.order.payload_bytes:
            self._weigh(measurement, self.order.payload_bytes)
        order = self._life.send(measurement)
        self.order = order._replace(payload_bytes=self._payload_bytes)
        self._steps += order.steps
        return self.order

    def _live(self) -> Steps:
        yield self._all(self._finest)  # its times hold tracing and connecting
        wait = min(FIRST_LOOK, self.interval)
        while True:
            self._measurements, self._steps_s, self._turns_s = {}, {}, {}
            has_much = np.sum(self.sent_bytes[:, 1]) >= _WORTH_PAYLOADS * FIRST_PAYLOAD_BYTES
            self._byte_s, self._payload_bytes = 0.0, FIRST_PAYLOAD_BYTES if has_much else 0
            for _ in range(MEASURED_STEPS):
                yield from self._time(self._finest)
            is_as_expected = True
            while is_as_expected:
                yield from self._probe()
                while (level := self._promising()) is not None:
                    yield from self._time(level)
                levels = yield from self._choose()
                self._report(levels)
                is_as_expected = yield from self._keep(levels, wait)
                wait = min(2 * wait, self.interval)

    # ---- measuring -------------------------------------------------------------------------------

    def _time(self, level: int) -> Steps:
        """One step of a level for all buckets."""
        measurement = yield self._all(level)
        self._measurements.setdefault(level, []).append(measurement)
        self._steps_s.setdefault(level, []).append(measurement.all_s)
        self._durations_s = self._times_of_levels()
        exact = min(self._measurements)
        self._ready_s = np.median([m.offsets_s() for m in self._measurements[exact]], 0)
        forecast_s = finish_time_s(self._ready_s, self._durations_s[:, exact])
        self._rest_s = max(0.0, self._median_s(exact) - forecast_s)

    def _weigh(self, measurement: Measurement, payload_bytes: int) -> None:
        """Takes from a payload what a byte of a sum takes at least, if it was large enough.

        It is if its bytes take half as long as the way does: a connection that was idle starts
        slowly, and takes one way more for each time that it doubles its speed.
        """
        trip_s = float(np.min(measurement.trip_s))
        bytes_s = max(0.0, float(np.min(measurement.payload_s)) - trip_s)
        # A gather sends all that the others have; around N ranks a sum sends 2 / N of that.
        of_a_sum = 2 / len(measurement.trip_s)
        self._byte_s = of_a_sum * bytes_s / payload_bytes / _LUCK
        most = min(MOST_PAYLOAD_BYTES, int(np.sum(self.sent_bytes[:, 1])))
        is_enough = bytes_s >= max(_SEEN_S, trip_s / 2) or payload_bytes >= most
        self._payload_bytes = 0 if is_enough else min(most, _MORE * payload_bytes)

    def _probe(self) -> Steps:
        measurement = yield self._all(self.probe)
        self._errors = np.max(measurement.errors, 0)
        self._energies = np.max(measurement.energies, 0)

    def _promising(self) -> int | None:
        """A level that the plan uses and that was timed too rarely, the cheapest first."""
        plan = {n if n in self.measured else self.measured[-1] for n in self._plan()}
        rarely = [n for n in plan if len(self._steps_s.get(n, ())) < MEASURED_STEPS]
        return max((n for n in rarely if not self._is_hopeless(n)), default=None)

    def _is_hopeless(self, level: int) -> bool:
        """Whether it would cost too much for all buckets, even if they are as fast as may be."""
        prices_s = [self._price_s(n) for n in self._allowed()]
        return self._price_of_all_s(level) > _HOPELESS * min(prices_s, default=np.inf)

    def _times_of_levels(self) -> np.ndarray:
        """`[bucket, level]`: what was timed, and the least that the rest may take."""
        least_s = self._byte_s * self.sent_bytes
        durations = np.where(np.arange(len(self.names)) <= 1, least_s, 0.0)
        for level, measurements in self._measurements.items():
            # Of one step: medians of each bucket might be of no step at all.
            times = sorted((m.durations_s() for m in measurements), key=np.sum)
            durations[:, level] = times[(len(times) - 1) // 2]
        first, last = self.measured[-2:]
        if last in self._measurements:
            for level in range(first + 1, last):
                share = (level - first) / (last - first)
                durations[:, level] = (1 - share) * durations[:, first] + share * durations[:, last]
        # A level computes more than level 0, and its bytes need their time: what looks faster has
        # left its time to a neighbour.
        exact_bytes = self.sent_bytes[:, :1]
        shares = self.sent_bytes / np.where(exact_bytes > 0, exact_bytes, 1.0)
        return np.maximum(durations, shares * durations[:, :1])

    # ---- deciding --------------------------------------------------------------------------------

    def _plan(self) -> list[int]:
        return choose_levels(
            self._ready_s,
            self._durations_s,
            self._errors,
            self._energies,
            self.max_error,
            self._rest_s,
        )

    def _choose(self) -> Generator[Order, Measurement, list[int]]:
        """The plan, unless steps show that the best level for all, or exact steps, are better."""
        plan = self._plan()
        best = min(self._allowed(), key=self._price_s)
        candidates = [plan]  # by preference
        if 0 in self._steps_s and not self._is_hopeless(0):
            candidates.insert(0, self._for_all(0))  # it loses nothing
        if not self._is_as_good(plan, best):
            candidates.append(self._for_all(best))
        candidates = [levels for n, levels in enumerate(candidates) if levels not in candidates[:n]]
        if len(candidates) == 1:
            return plan
        if not all(tuple(levels) in self._turns_s for levels in candidates):
            yield from self._take_turns(candidates)
        prices_s = [price_s(self._turns_s[tuple(each)], self._worth(each)) for each in candidates]
        # What is less preferred has to be better.
        chosen = int(np.argmin(prices_s * (1 + _TOLERANCE) ** np.arange(len(candidates))))
        if candidates[chosen] != plan:
            planned = candidates.index(plan)
            self._say(
                f"{', '.join(self.names[level] for level in plan)} took "
                f"{1e3 * prices_s[planned]:.1f} ms for what an exact step is worth, "
                f"{self.names[candidates[chosen][0]]} for all {1e3 * prices_s[chosen]:.1f} ms"
            )
        return candidates[chosen]

    def _take_turns(self, candidates: Sequence[list[int]]) -> Steps:
        steps = len(candidates) * TURNS
        measurement = yield Order(list(candidates), steps)
        steps_s = measurement.steps_s(steps)
        for number, levels in enumerate(candidates):
            self._turns_s[tuple(levels)] = float(np.median(steps_s[number :: len(candidates)]))

    def _is_as_good(self, plan: list[int], best: int) -> bool:
        """Whether the plan is a measured level for all, and as good as the best of these."""
        if len(set(plan)) > 1 or plan[0] not in self._steps_s:
            return False
        return self._price_s(plan[0]) <= (1 + _TOLERANCE) * self._price_s(best)

    def _allowed(self) -> list[int]:
        """The measured levels whose error is nowhere too large."""
        return [n for n in self._steps_s if np.max(self._errors[:, n]) <= self.max_error]

    def _price_s(self, level: int) -> float:
        return price_s(self._median_s(level), self._worth(self._for_all(level)))

    def _worth(self, levels: list[int]) -> float:
        return worth(levels, self._errors, self._energies)

    def _median_s(self, level: int) -> float:
        return float(np.median(self._steps_s[level]))

    # ---- afterwards ------------------------------------------------------------------------------

    def _keep(self, levels: list[int], wait: int) -> Generator[Order, Measurement, bool]:
        """Runs the decided levels for `wait` steps; returns whether they take what they took."""
        expected_s = sum(self._durations_s[k, level] for k, level in enumerate(levels))
        received_s: list[float] = []
        for steps in (wait, 1, 1):
            measurement = yield Order([levels], steps)
            if not received_s:
                each_ms = 1e3 * measurement.all_s / steps
                self._say(
                    f"{steps} steps took {each_ms:.1f} ms each, pauses included "
                    f"(forecast: {1e3 * self._forecast_s(levels):.1f} ms)"
                )
            received_s.append(float(np.sum(measurement.durations_s())))
            median_s = float(np.median(received_s))
            if len(received_s) != 2 and _is_near(median_s, expected_s):
                return True
        self._say(f"communication took {median_s:.4f} s instead of {expected_s:.4f} s: measures")
        return False

    def _report(self, levels: list[int]) -> None:
        for k, level in enumerate(levels):
            options = ", ".join(
                f"{name} {self._least(n)}{1e3 * time:.1f} ms, error {error:.3g}"
                for n, (name, time, error) in enumerate(
                    zip(self.names, self._durations_s[k], self._errors[k], strict=True)
                )
            )
            self._say(f"bucket {k} is sent as {self.names[level]} (of: {options})")
        self._say(f"this is why: {self._reason(levels)}")

    def _reason(self, levels: list[int]) -> str:
        """What the decision gives for its price, and what others would."""
        step_s, worth_of_step = self._forecast_s(levels), self._worth(levels)
        others = [
            f"{name} for all {self._least(n)}{1e3 * price:.1f} ms"
            for n, name in enumerate(self.names)
            if np.max(self._errors[:, n]) <= self.max_error
            and np.isfinite(price := self._price_of_all_s(n))
            and levels != self._for_all(n)
        ]
        return (
            f"a step takes {1e3 * step_s:.1f} ms and is worth {worth_of_step:.3f} of an exact one: "
            f"{1e3 * price_s(step_s, worth_of_step):.1f} ms for the worth of one "
            f"(others: {', '.join(others) or 'none are allowed'})"
        )

    def _forecast_s(self, levels: list[int]) -> float:
        """What a step of these levels takes: as was seen, or by its buckets' times."""
        if tuple(levels) in self._turns_s:
            return self._turns_s[tuple(levels)]
        if len(set(levels)) == 1 and levels[0] in self._steps_s:
            return self._median_s(levels[0])
        durations_s = self._durations_s[range(self.num_buckets), levels]
        return self._rest_s + finish_time_s(self._ready_s, durations_s)

    def _price_of_all_s(self, level: int) -> float:
        levels = self._for_all(level)
        return price_s(self._forecast_s(levels), self._worth(levels))

    def _least(self, level: int) -> str:
        """What stands before a time that nobody has measured."""
        known = level if level in self.measured else self.measured[-1]
        return "" if known in self._measurements else "at least "

    def _all(self, level: int) -> Order:
        return Order([self._for_all(level)])

    def _for_all(self, level: int) -> list[int]:
        return [level] * self.num_buckets

    def _say(self, text: str) -> None:
        self.log.append(f"step {self._steps}: {text}")


def _is_near(received_s: float, expected_s: float) -> bool:
    return expected_s / _CHANGE < received_s < expected_s * _CHANGE
