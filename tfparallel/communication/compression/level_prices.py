"""What levels cost by all that was measured so far, and which of them would be best.

Plain Python: no tensor, no device. Levels are numbers, from exact to coarse.
"""

from collections.abc import Sequence

import numpy as np

from tfparallel.communication.compression.adaptive_orders import TimesOfStep
from tfparallel.communication.compression.level_costs import (
    choose_levels,
    finish_time_s,
    price_s,
    worth,
)
from tfparallel.communication.compression.payloads import Payloads

# By which a coarser approximation has to be better, as errors grow in training: more, if what comes
# late does not count. Of a GPT with Adam that of rank 4 grew from 0.28 to 0.77 in 25 steps.
COARSER = {True: 0.1, False: 0.3}
_ROUNDED = 2.0**-11  # the error of float16 at most, of what is not tiny
_SEEN = 0.1  # of what float16 takes: what exact sums send beyond it has to take so much to be told
HOPELESS = 1.5  # times the best price: what costs so much at the least is not tried


class LevelPrices:
    """Times, errors and what they come to.

    Args:
        sent_bytes: `[bucket, level]`: what each sends.
        measured: the levels that are timed; what is between the last two is interpolated.
        max_error: see `choose_levels`.
        late_counts: see `worth`.
        payloads: what they told stands for what was not timed.

    Attributes:
        times: steps of a level for all buckets.
        turns_s: medians of plans that were tried.
        durations_s: `[bucket, level]`: what was timed, and the least that the rest may take.
        errors, energies: see `worth`.
    """

    def __init__(
        self,
        sent_bytes: np.ndarray,
        measured: Sequence[int],
        max_error: float,
        late_counts: bool,
        payloads: Payloads,
    ):
        self._sent_bytes, self._measured = sent_bytes, measured
        self._max_error, self._late_counts = max_error, late_counts
        self._payloads = payloads
        self._num_buckets, self._num_levels = sent_bytes.shape
        self.errors = np.zeros(sent_bytes.shape)
        self.energies = np.ones(self._num_buckets)
        self.forget()

    def forget(self) -> None:
        """Times are to be measured anew."""
        self.times: dict[int, list[TimesOfStep]] = {}
        self.turns_s: dict[tuple[int, ...], float] = {}

    def take(self, level: int, taken: Sequence[TimesOfStep]) -> None:
        """Steps of a level for all buckets."""
        self.times[level] = [*self.times.get(level, ()), *taken]
        self.durations_s = self._times_of_levels()
        exact = min(self.times)
        self._ready_s = np.median([each.offsets_s for each in self.times[exact]], 0)
        forecast_s = finish_time_s(self._ready_s, self.durations_s[:, exact])
        self._rest_s = max(0.0, self.median_s(exact) - forecast_s)

    def give_up_approximating(self) -> None:
        """No plan is to approximate a bucket: that is worth nothing."""
        self.errors = np.full(self._sent_bytes.shape, np.inf)
        self.errors[:, :2] = 0.0, _ROUNDED
        self.energies = np.ones(self._num_buckets)

    def is_approximated_in_vain(self) -> bool:
        """Whether no approximation can be better by as much as it has to be, by what is known."""
        if self._late_counts or 1 not in self.times or max(self.times) > 1:
            return False
        half_s, sent_bytes = self.median_s(1), np.sum(self._sent_bytes, 0)
        least_s = half_s - self._payloads.bytes_s(sent_bytes[1] - sent_bytes[-1])
        least_s += self._payloads.trip_s  # of its second sum
        return half_s <= (1 + COARSER[False]) * least_s

    def fastest_exact(self) -> tuple[float, float]:
        """What a step took, and how long it waited for sums: other work makes both longer."""
        taken = min(self.times[0], key=lambda taken: taken.all_s)
        finish_s = finish_time_s(taken.offsets_s, taken.durations_s)
        return taken.all_s, finish_s - float(np.max(taken.offsets_s))

    def median_s(self, level: int) -> float:
        """What a step of a level for all buckets took."""
        return float(np.median([taken.all_s for taken in self.times[level]]))

    def forecast_s(self, levels: list[int]) -> float:
        """What a step of these levels takes: as was seen, or by its buckets' times."""
        if tuple(levels) in self.turns_s:
            return self.turns_s[tuple(levels)]
        if len(set(levels)) == 1 and levels[0] in self.times:
            return self.median_s(levels[0])
        durations_s = self.durations_s[range(self._num_buckets), levels]
        return self._rest_s + finish_time_s(self._ready_s, durations_s)

    def price_of_all_s(self, level: int) -> float:
        """Seconds for what an exact step is worth, by forecast, of a level for all buckets."""
        levels = self._for_all(level)
        return price_s(self.forecast_s(levels), self.worth(levels))

    def worth(self, levels: list[int]) -> float:
        """As the function of that name."""
        return worth(levels, self.errors, self.energies, self._late_counts)

    def is_hopeless(self, level: int) -> bool:
        """Whether it would cost too much for all buckets, even if they are as fast as may be."""
        prices_s = [self.price_s(n) for n in self.allowed()]
        return self.price_of_all_s(level) > HOPELESS * min(prices_s, default=np.inf)

    def preferred(self) -> list[int]:
        """The plan, or a finer level for all that is about as good."""
        plan = choose_levels(
            self._ready_s,
            self.durations_s,
            self.errors,
            self.energies,
            self._max_error,
            self._rest_s,
            self._late_counts,
        )
        return plan if len(set(plan)) > 1 else self._for_all(self.finest_near(plan[0]))

    def finest_near(self, level: int) -> int:
        """The finest approximation that was timed and is about as good for all as `level`."""
        most_s = (1 + COARSER[self._late_counts]) * self.price_of_all_s(level)
        near = [n for n in self.allowed() if 0 < n < level and self.price_s(n) <= most_s]
        return min(near, default=level)

    def allowed(self) -> list[int]:
        """The measured levels whose error is nowhere too large."""
        return [n for n in self.times if np.max(self.errors[:, n]) <= self._max_error]

    def price_s(self, level: int) -> float:
        """The same of a level that was timed, by its own steps alone."""
        return price_s(self.median_s(level), self.worth(self._for_all(level)))

    def _times_of_levels(self) -> np.ndarray:
        """`[bucket, level]`: what was timed, and the least that the rest may take."""
        least_s = self._payloads.least_s(self._sent_bytes)
        durations = np.where(np.arange(self._num_levels) <= 1, least_s, 0.0)
        for level, taken in self.times.items():
            # Of one step: medians of each bucket might be of no step at all.
            times = sorted((each.durations_s for each in taken), key=np.sum)
            durations[:, level] = times[(len(times) - 1) // 2]
        if 1 in self.times and 0 not in self.times and not self._late_counts:
            # The same exchange, of more bytes; but a cast may cost what few of them do.
            more_s = self._payloads.least_s(self._sent_bytes[:, 0] - self._sent_bytes[:, 1])
            if np.sum(more_s) > _SEEN * np.sum(durations[:, 1]):
                durations[:, 0] = np.maximum(durations[:, 0], durations[:, 1] + more_s)
        first, last = self._measured[-2:]
        if first in self.times and last in self.times:
            for level in range(first + 1, last):
                share = (level - first) / (last - first)
                durations[:, level] = (1 - share) * durations[:, first] + share * durations[:, last]
        # A level computes more than level 0, and its bytes need their time: what looks faster has
        # left its time to a neighbour.
        exact_bytes = self._sent_bytes[:, :1]
        shares = self._sent_bytes / np.where(exact_bytes > 0, exact_bytes, 1.0)
        return np.maximum(durations, shares * durations[:, :1])

    def _for_all(self, level: int) -> list[int]:
        return [level] * self._num_buckets
