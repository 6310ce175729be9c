"""What `Adaptive` has ranks do for some steps, and what they saw of these.

Plain Python: no tensor, no device. Levels are numbers, from exact to coarse.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MOST_ROWS = 15  # steps of an order, unless all are alike


class Order(NamedTuple):
    """What follows.

    Attributes:
        rows: the levels of the buckets, step by step, again and again; up to `MOST_ROWS` steps,
            any number if there is one row.
        steps: after which the controller is asked again.
        payload_bytes: what ranks sum before it is, to see how long bytes take.
    """

    rows: list[list[int]]
    steps: int = 1
    payload_bytes: int = 0


class TimesOfStep(NamedTuple):
    """What a step took.

    Attributes:
        offsets_s: `[bucket]`: when each was ready, after the first, on the slowest rank.
        durations_s: `[bucket]`: how long each took, less the waiting for who came last. A bucket's
            second round shares a collective with the next bucket's first: where the network is
            faster than the backward pass, its time holds the waiting for that.
        all_s: the whole step, which the pause before it is part of; the mean over ranks.
    """

    offsets_s: np.ndarray
    durations_s: np.ndarray
    all_s: float


@dataclass(frozen=True)
class Measurement:
    """The steps of an order as all ranks saw them, each by its own clock.

    Attributes:
        ready_s, done_s: `[rank, step, bucket]`, of the last steps, `MOST_ROWS` at most: when its
            gradients and when its sums were there.
        errors: `[rank, bucket, level]`, if the last step was a probing one; zeros otherwise.
        energies: `[rank, bucket]`, as in `worth`, likewise.
        began_s: `[rank]`: when the order was there.
        payload_bytes: what ranks summed to see how long bytes take; 0 if they did not.
        trip_s: `[rank]`: what the smallest sum took.
        payload_s: `[rank, 2]`: what two of the payload took.
    """

    ready_s: np.ndarray
    done_s: np.ndarray
    errors: np.ndarray
    energies: np.ndarray
    began_s: np.ndarray
    payload_bytes: int
    trip_s: np.ndarray
    payload_s: np.ndarray

    def of_steps(self, steps: int, trip_s: float) -> list[TimesOfStep]:
        """The last `steps` steps, of which the first followed the order at once.

        Of two ranks the one that comes later by less than a message is on its way waits for so much
        less, and the other for so much more: the mean is what a sum takes. Who comes later than
        that finds the message there, and sees all but its way.

        Args:
            steps: how many.
            trip_s: what the smallest sum takes.
        """
        # One may be decompressed before an earlier one is: then it took no time of its own.
        done_s = np.maximum.accumulate(self.done_s, axis=2)
        before_s = np.concatenate([self.ready_s[:, :, :1], done_s[:, :, :-1]], 2)
        taken_s = done_s - np.maximum(self.ready_s, before_s)
        durations_s = np.minimum(np.mean(taken_s, 0), np.min(taken_s, 0) + trip_s)
        offsets_s = np.max(self.ready_s - self.ready_s[:, :, :1], 0)
        ends_s = done_s[:, -steps:, -1]
        all_s = np.mean(np.diff(ends_s, prepend=self.began_s[:, None]), 0)
        taken = zip(offsets_s[-steps:], durations_s[-steps:], all_s.tolist(), strict=True)
        return [TimesOfStep(*each) for each in taken]

    @property
    def all_s(self) -> float:
        """What all steps of the order took."""
        return float(np.max(np.max(self.done_s[:, -1], 1) - self.began_s))
