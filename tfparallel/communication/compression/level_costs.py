"""What levels of compression cost and are worth, and which of them are best, by forecast.

Plain Python: no tensor, no device. Levels are numbers, from exact to coarse.
"""

from collections.abc import Sequence

import numpy as np


def finish_time_s(
    ready_s: Sequence[float] | np.ndarray, durations_s: Sequence[float] | np.ndarray
) -> float:
    """When the last bucket is reduced, if each begins once it is ready and the one before is done.

    Args:
        ready_s: when each bucket's gradients are computed, in the order of reduction.
        durations_s: what compressing, sending and decompressing each takes.
    """
    done = 0.0
    for ready, duration in zip(ready_s, durations_s, strict=True):
        done = max(done, ready) + duration
    return done


def worth(
    levels: Sequence[int], errors: np.ndarray, energies: np.ndarray, late_counts: bool
) -> float:
    """How much of an exact step one is with these levels.

    What a projection such as PowerSGD's leaves out is orthogonal to what it sends: a step along
    what is sent lowers the loss, to first order, by the cosine between that and what is meant,
    `cos^2 = 1 - |m - sent|^2 / |m|^2`. But what is left out is not lost: the next step sends as
    much of it as this one did of all (Karimireddy et al., https://arxiv.org/abs/1901.09847, bound
    what it costs to be late). What comes one step late counts as sent, what comes later does not:
    with an error e, `cos^2 = 1 - e^4`. Measured steps to a loss are about as many, or fewer
    (docs/measurements/time_to_loss.md).

    Not so where an optimizer divides by what gradients were before, as Adam does: what is late is
    then divided by something else (Tang et al., https://arxiv.org/abs/2102.02888), and `cos^2 = 1 -
    e^2`. Measured steps of a GPT with Adam are 1.2 to 1.4 times as many by rank 4, up to 1.7 by
    rank 2 (docs/measurements/time_to_loss_all.md).

    Args:
        levels: of each bucket.
        errors: `[bucket, level]`, `|m - sent| / |m|`; level 0 has none.
        energies: `[bucket]`, proportional to `|m|^2`.
        late_counts: whether what comes one step late counts as sent.
    """
    power = 4 if late_counts else 2
    still_left_out = errors[np.arange(len(energies)), list(levels)] ** power
    left_out = np.sum(energies * still_left_out) / max(np.sum(energies), np.finfo(float).tiny)
    return float(np.sqrt(max(0.0, 1.0 - left_out)))


def price_s(step_s: float, worth_of_step: float) -> float:
    """Seconds for what an exact step is worth."""
    return step_s / worth_of_step if worth_of_step else np.inf


def choose_levels(
    ready_s: Sequence[float] | np.ndarray,
    durations_s: np.ndarray,
    errors: np.ndarray,
    energies: np.ndarray,
    max_error: float,
    rest_s: float,
    late_counts: bool,
) -> list[int]:
    """The levels with which a second of training is worth most exact steps.

    From every level for all buckets, it changes one bucket at a time, to its best level, until none
    is better; the best end is taken.

    Args:
        ready_s: as in `finish_time_s`.
        durations_s: `[bucket, level]`.
        errors, energies: as in `worth`.
        max_error: the largest error that is allowed.
        rest_s: what a step takes besides: until the first bucket is ready, and after the last.
        late_counts: as in `worth`.
    """
    num_buckets, num_levels = durations_s.shape
    buckets = range(num_buckets)
    allowed = [np.flatnonzero(errors[k] <= max_error) for k in buckets]

    def cost_s(levels: Sequence[int]) -> float:
        finish_s = finish_time_s(ready_s, durations_s[buckets, levels])
        return price_s(rest_s + finish_s, worth(levels, errors, energies, late_counts))

    def improved(levels: list[int]) -> list[int]:
        for k in buckets:
            others = [[*levels[:k], int(level), *levels[k + 1 :]] for level in allowed[k]]
            levels = min([levels, *others], key=cost_s)
        return levels

    ends = []
    for start in range(num_levels):
        levels = [start if start in allowed[k] else 0 for k in buckets]
        while (better := improved(levels)) != levels:
            levels = better
        ends.append(levels)
    return min(ends, key=cost_s)
