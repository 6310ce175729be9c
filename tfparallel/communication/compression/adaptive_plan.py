"""Which level of compression each bucket gets, decided from measured times and errors.

Plain Python: no tensor, no device. Levels are numbers, from exact to coarse.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfparallel.communication.compression.adaptive_orders import (
    MOST_ROWS,
    Measurement,
    Order,
    TimesOfStep,
)
from tfparallel.communication.compression.level_costs import price_s
from tfparallel.communication.compression.level_prices import COARSER, HOPELESS, LevelPrices
from tfparallel.communication.compression.payloads import Payloads

MEASURED_STEPS = 4  # with each level for all; the median counts: every second step may be longer
TURNS = MOST_ROWS // 3  # of a plan, the best level for all buckets, and exact steps
FIRST_TURNS = 2  # tell what is hopeless
SMALL_BYTES = 1 << 20  # what has no more to send begins with an exact step, unseen
_AT_ONCE_S = 0.15  # what exact sums may take for such steps to be the first that are timed
_SOON_S = 1.0  # what exact sums may take for float16 to be tried before what is approximate
_HARDLY = 1.2  # times a step without waiting for sums: an exact one that takes no more stays
FIRST_LOOK = 20  # steps; each interval after it is twice as long
_SLOWLY = 0.5  # of an approximate step: what is longer by that is not timed as it begins
_TOLERANCE = 0.03  # of what the best costs: within it a forecast is believed
_CHANGE = 1.5  # times that differ by more than this factor are measured again

Steps = Generator[Order, Measurement, None]


@dataclass
class Controller:
    """Says which level each bucket gets for the next steps, and when it wants to see times again.

    The first step, which is traced, is exact if there is little to send, and of the finest
    approximate level otherwise; a payload with it shows what bytes take. If exact sums take no
    long time by that, exact steps are timed, twice if need be, and stay if hardly a part of them is
    waiting that compression could spare: then no gradient of a training is ever approximated.

    Otherwise it times the finest of the approximate levels and estimates errors in one probing
    step. Of what was never timed it hopes for the best: it plans, and times what the plan uses,
    until all of it is known. Over a slow link one exact step takes as long as twenty approximate
    ones: what is hopeless for all by what payloads took, larger ones if need be, is never tried for
    all, though a plan may use it where there is little to send. A plan is a forecast: unless it is
    known to be as good as the best level for all buckets, it takes turns with that for a few steps,
    once, and the better one stays. So it does with exact steps, which lose nothing, unless these
    are hopeless: three steps of a busy machine tell no tenth of a step.

    Where what is late does not count, a few approximate steps cost many in the end: of a GPT with
    Adam seven of the first cost up to fourteen. There float16 is timed first, and no approximation
    is tried that would not be better by `COARSER` if it had no error.

    After `FIRST_LOOK` steps, and then twice as many each time up to `interval`, it looks at one
    step, and at two more if that took another time than expected: it measures everything anew if
    times have changed, and probes and plans again if they have not.

    Args:
        sent_bytes: `[bucket, level]`: what each sends.
        names: of the levels, from exact to coarse; those from 2 on are approximate.
        measured: the levels that are timed; what is between the last two is interpolated.
        probe: the number that stands for a probing step; it is timed like no level.
        max_error: see `choose_levels`.
        interval: the most steps between two decisions.
        late_counts: see `worth`.

    Attributes:
        order: what is to be done now.
        log: decisions, with the times and errors that they were taken from.
    """

    sent_bytes: np.ndarray
    names: Sequence[str]
    measured: Sequence[int]
    probe: int
    max_error: float
    interval: int
    late_counts: bool = True
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_buckets = len(self.sent_bytes)
        self._finest = min([n for n in self.measured if n > 1], default=self.measured[-1])
        self._exact_bytes = int(np.sum(self.sent_bytes[:, 0]))
        self._payloads = Payloads(self._exact_bytes)
        self._steps = 0
        known = self.sent_bytes, self.measured, self.max_error, self.late_counts, self._payloads
        self._known = LevelPrices(*known)
        self._life = self._live()
        self.order = next(self._life)._replace(payload_bytes=self._payloads.next_bytes)

    def advance(self, measurement: Measurement) -> Order:
        """What follows the steps that were measured; the first one was `order`, as it is made."""
        if measurement.payload_bytes:  # none where a backup has the order of another controller
            took_s = measurement.payload_s, measurement.trip_s
            self._payloads.weigh(measurement.payload_bytes, *took_s)
        order = self._life.send(measurement)
        self.order = order._replace(payload_bytes=self._payloads.next_bytes)
        self._steps += order.steps
        return self.order

    def _live(self) -> Steps:
        # Its times hold tracing and connecting.
        yield self._all(0 if self._exact_bytes <= SMALL_BYTES else self._finest)
        wait = min(FIRST_LOOK, self.interval)
        while True:
            if self._payloads.exact_s <= _AT_ONCE_S:
                self._payloads.end()
                yield from self._time(0, 1)
                if self._is_nearly_free() or not self._is_as_payloads_told():
                    yield from self._time(0, MEASURED_STEPS - 1)
                if not self._is_nearly_free() and not self._is_as_payloads_told():
                    yield from self._time(0)  # beside other work sums are waited for, too
            is_as_expected = True
            while is_as_expected:
                levels = self._for_all(0)
                if not self._is_nearly_free():
                    levels = yield from self._compared()
                elif self.order.rows != [levels]:  # and not kept already
                    self._payloads.end()
                    self._say(f"all is sent as {self.names[0]}: {self._waits()}")
                is_as_expected = yield from self._keep(levels, wait)
                wait = min(2 * wait, self.interval)
            self._payloads.start()
            self._known.forget()
            if levels != self._for_all(0):  # what exact steps took is known
                yield Order([levels])  # and a payload, as in the first step

    # ---- measuring -------------------------------------------------------------------------------

    def _time(self, level: int, steps: int = MEASURED_STEPS, then_probe: bool = False) -> Steps:
        """Some steps of a level for all buckets, and a probing one.

        A new approximation has one more before them, in which TensorFlow prepares its functions;
        so has a finer level where a step of it would tell most of all how TCP begins.
        """
        first = int(level not in self._known.times and (level > 1 or self._begins_slowly(level)))
        rows = [self._for_all(level)] * (first + steps) + [self._for_all(self.probe)] * then_probe
        measurement = yield Order(rows, len(rows))
        taken = self._steps_of(measurement, len(rows))[first : first + steps]
        self._known.take(level, taken)
        if then_probe:
            self._take_errors(measurement)

    def _steps_of(self, measurement: Measurement, steps: int) -> list[TimesOfStep]:
        return measurement.of_steps(steps, self._payloads.trip_s)

    def _begins_slowly(self, level: int) -> bool:
        """Whether the first step after coarser ones takes much longer than those behind it."""
        known_s = [self._known.median_s(n) for n in self._known.times if n > 1]
        starting_s = self._payloads.starting_s(float(np.sum(self.sent_bytes[:, level])))
        return starting_s > _SLOWLY * min(known_s, default=np.inf)

    def _probe(self) -> Steps:
        measurement = yield self._all(self.probe)
        self._take_errors(measurement)

    def _take_errors(self, measurement: Measurement) -> None:
        self._known.errors = np.max(measurement.errors, 0)
        self._known.energies = np.max(measurement.energies, 0)

    def _is_nearly_free(self) -> bool:
        """Whether exact steps wait so little for sums that compression could hardly spare any."""
        if 0 not in self._known.times:
            return False
        step_s, waiting_s = self._known.fastest_exact()
        return step_s <= _HARDLY * (step_s - max(0.0, waiting_s - self._payloads.trip_s))

    def _is_as_payloads_told(self) -> bool:
        """Whether exact steps wait for about as long as the link makes them."""
        return self._payloads.have_told(self._known.fastest_exact()[1])

    def _waits(self) -> str:
        step_ms, waiting_ms = (1e3 * seconds for seconds in self._known.fastest_exact())
        return (
            f"of {step_ms:.1f} ms a step waits {waiting_ms:.1f} ms for sums, the smallest sum "
            f"takes {1e3 * self._payloads.trip_s:.1f} ms"
        )

    def _compared(self) -> Generator[Order, Measurement, list[int]]:
        """The best levels, by times and errors."""
        if (
            not self.late_counts
            and self._payloads.exact_s <= _SOON_S
            and 1 not in self._known.times
        ):
            yield from self._time(1)
        is_in_vain = self._known.is_approximated_in_vain()
        if is_in_vain:
            self._known.give_up_approximating()
        elif self._finest in self._known.times:
            yield from self._probe()
        else:
            yield from self._time(self._finest, then_probe=True)
        while (level := self._promising()) is not None:
            is_unknown = (
                level < 2 and level not in self._known.times
            )  # it may be hopeless after all
            timed = len(self._known.times.get(level, ()))
            yield from self._time(level, 1 if is_unknown else MEASURED_STEPS - timed)
        levels = yield from self._choose()
        if not is_in_vain:
            self._report(levels)
        elif self.order.rows != [levels]:  # and not kept already
            self._say(
                "no approximation is tried: even without an error none would be better by "
                f"{COARSER[False]:.0%}, as it has to be. This is why: {self._reason(levels)}"
            )
        return levels

    def _promising(self) -> int | None:
        """A level that the plan uses and that was timed too rarely, the cheapest first."""
        plan = {n if n in self.measured else self.measured[-1] for n in self._known.preferred()}
        rarely = [n for n in plan if len(self._known.times.get(n, ())) < MEASURED_STEPS]
        return max((n for n in rarely if not self._known.is_hopeless(n)), default=None)

    # ---- deciding --------------------------------------------------------------------------------

    def _choose(self) -> Generator[Order, Measurement, list[int]]:
        """The plan, unless steps show that the best level for all, or exact steps, are better."""
        plan = self._known.preferred()
        best = self._known.finest_near(min(self._known.allowed(), key=self._known.price_s))
        candidates = [plan]  # by preference
        if 0 in self._known.times and not self._known.is_hopeless(0):
            candidates.insert(0, self._for_all(0))  # it loses nothing
        if not self._is_as_good(plan, best):
            candidates.append(self._for_all(best))
        candidates = [levels for n, levels in enumerate(candidates) if levels not in candidates[:n]]
        if len(candidates) == 1:
            return plan
        if not all(tuple(levels) in self._known.turns_s for levels in candidates):
            yield from self._take_turns(candidates)
        prices_s = [
            price_s(self._known.turns_s[tuple(each)], self._known.worth(each))
            for each in candidates
        ]
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
        """Times them in turns; after the first ones no more what is hopeless by these."""
        left, seen_s = [*candidates], {tuple(levels): np.empty(0) for levels in candidates}
        for turns in (FIRST_TURNS, TURNS - FIRST_TURNS):
            steps = len(left) * turns
            measurement = yield Order(left, steps)
            steps_s = np.array([taken.all_s for taken in self._steps_of(measurement, steps)])
            for number, levels in enumerate(left):
                own_s = steps_s[number :: len(left)]
                seen_s[tuple(levels)] = np.append(seen_s[tuple(levels)], own_s)
            least_s = [
                price_s(np.min(seen_s[tuple(each)]), self._known.worth(each)) for each in left
            ]
            left = [
                levels
                for levels, price in zip(left, least_s, strict=True)
                if price <= HOPELESS * min(least_s)
            ]
            if len(left) == 1:
                break
        self._known.turns_s |= {levels: float(np.median(own_s)) for levels, own_s in seen_s.items()}

    def _is_as_good(self, plan: list[int], best: int) -> bool:
        """Whether the plan is a measured level for all, and as good as the best of these."""
        if len(set(plan)) > 1 or plan[0] not in self._known.times:
            return False
        return self._known.price_s(plan[0]) <= (1 + _TOLERANCE) * self._known.price_s(best)

    # ---- afterwards ------------------------------------------------------------------------------

    def _keep(self, levels: list[int], wait: int) -> Generator[Order, Measurement, bool]:
        """Runs the decided levels for `wait` steps; returns whether they take what they took."""
        expected_s = sum(self._known.durations_s[k, level] for k, level in enumerate(levels))
        is_exact = levels == self._for_all(0)
        received_s: list[float] = []
        for steps in (wait, 1, 1):
            measurement = yield Order([levels], steps)
            if not received_s:
                each_ms = 1e3 * measurement.all_s / steps
                self._say(
                    f"{steps} steps took {each_ms:.1f} ms each, pauses included "
                    f"(forecast: {1e3 * self._known.forecast_s(levels):.1f} ms)"
                )
            (taken,) = self._steps_of(measurement, 1)
            received_s.append(float(np.sum(taken.durations_s)))
            median_s = float(np.median(received_s))
            if is_exact and median_s < expected_s:
                return True  # nothing can be better than what became faster
            if len(received_s) != 2 and _is_near(median_s, expected_s):
                return True
        self._payloads.exact_s = median_s if is_exact else np.inf
        self._say(f"communication took {median_s:.4f} s instead of {expected_s:.4f} s: measures")
        return False

    def _report(self, levels: list[int]) -> None:
        for k, level in enumerate(levels):
            options = ", ".join(
                f"{name} {self._least(n)}{1e3 * time:.1f} ms, error {error:.3g}"
                for n, (name, time, error) in enumerate(
                    zip(self.names, self._known.durations_s[k], self._known.errors[k], strict=True)
                )
            )
            self._say(f"bucket {k} is sent as {self.names[level]} (of: {options})")
        self._say(f"this is why: {self._reason(levels)}")

    def _reason(self, levels: list[int]) -> str:
        """What the decision gives for its price, and what others would."""
        step_s, worth_of_step = self._known.forecast_s(levels), self._known.worth(levels)
        others = [
            f"{name} for all {self._least(n)}{1e3 * price:.1f} ms"
            for n, name in enumerate(self.names)
            if np.max(self._known.errors[:, n]) <= self.max_error
            and np.isfinite(price := self._known.price_of_all_s(n))
            and levels != self._for_all(n)
        ]
        return (
            f"a step takes {1e3 * step_s:.1f} ms and is worth {worth_of_step:.3f} of an exact one: "
            f"{1e3 * price_s(step_s, worth_of_step):.1f} ms for the worth of one "
            f"(others: {', '.join(others) or 'none are allowed'})"
        )

    def _least(self, level: int) -> str:
        """What stands before a time that nobody has measured."""
        known = level if level in self.measured else self.measured[-1]
        return "" if known in self._known.times else "at least "

    def _all(self, level: int) -> Order:
        return Order([self._for_all(level)])

    def _for_all(self, level: int) -> list[int]:
        return [level] * self.num_buckets

    def _say(self, text: str) -> None:
        self.log.append(f"step {self._steps}: {text}")


def _is_near(received_s: float, expected_s: float) -> bool:
    return expected_s / _CHANGE < received_s < expected_s * _CHANGE
