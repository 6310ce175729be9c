"""Finds a rank that has other weights than the rest: a flipped bit, a lost update, a mistake.

Replicas hold the same bits at all times. So every `every_steps` steps each makes a hash of its own
copies. The hashes ride on the sum of the metrics over workers, each in a place of its own, where
the others add zeros: no collective is added. All ranks see all hashes, and all raise.

    rank 0's slots   [h0 h0 h0  0  0  0]
    rank 1's slots   [ 0  0  0 h1 h1 h1]     sum: [h0 h0 h0 h1 h1 h1]

A hash is the sum of all bits as whole numbers: any flip of one bit changes it.

Where weights are in parts, a rank makes one hash of those that all ranks hold, and one of its
parts, which only some ranks hold, too.

A NaN on one rank is on all of them a step later, as gradients are added: hashes agree. So each rank
also notes in which step its own metrics (the loss among them) stopped being finite, and tells that.
Whoever was first is named, in a warning: rows can do that as well as memory.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfparallel.coordination.waiting import say
from tfparallel.internals import ResourceVariable

_PIECE_BITS, _PIECES = 22, 3  # of 64 bits; a float32 holds whole numbers of 24
_FACTOR = 1_000_003  # odd: of two variables that swap their values the hash differs


class WeightsDifferError(RuntimeError):
    """Ranks that train together hold different weights."""


class WeightsCheck:
    """Compares the ranks' weights in a step's graph.

    Args:
        rank, num_ranks: this rank's position, and how many there are.
        every_steps: how often.
        holders: of each group of weights, such as parts, the sets of ranks that hold the same; by
            default there is one group, which all hold.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        every_steps: int,
        holders: Sequence[Sequence[Sequence[int]]] | None = None,
    ):
        if every_steps < 1:
            raise ValueError(f"check_weights_every is a number of steps. Received: {every_steps}.")
        self._rank, self._num_ranks, self._every_steps = rank, num_ranks, every_steps
        with tf.init_scope(), tf.device("CPU:0"):
            # Not `tf.Variable`: under a strategy's scope it would be replicated.
            self._steps = ResourceVariable(tf.constant(0, tf.int64), trainable=False)
            self._not_finite = ResourceVariable(tf.constant(0, tf.int64), trainable=False)
        self._compared = [
            (slice(start, start + _PIECES), list(ranks))  # which columns of `slots`, in which rows
            for start, sets in zip(
                itertools.count(1, _PIECES), holders or [[range(num_ranks)]], strict=False
            )
            for ranks in sets
        ]
        self._has_warned = False

    def slots(
        self, groups: Sequence[Sequence[tf.Tensor]], metrics: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """`[num_ranks, 2 + 3 * groups]`, float32, to be summed over ranks; once in each step.

        Args:
            groups: of weights, read after the step's update, in the order of `holders`.
            metrics: this rank's own sums.
        """
        is_due, first = self._counted(metrics)
        pieces = tf.cond(
            is_due,
            lambda: _pieces_of(groups),
            lambda: tf.zeros([_PIECES * len(groups)], tf.float32),
        )
        return self._in_place(tf.concat([tf.cast([is_due], tf.float32), pieces, [first]], 0))

    def compare(
        self,
        groups: Sequence[Sequence[tf.Tensor]],
        metrics: Sequence[tf.Tensor],
        all_reduce: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        """`slots` and `verify` at once; called once in each step, and only some send anything.

        Args:
            groups, metrics: as of `slots`.
            all_reduce: sums a tensor over ranks, in a branch.
        """
        is_due, first = self._counted(metrics)

        def compared() -> tf.Tensor:
            slots = self._in_place(tf.concat([[1.0], _pieces_of(groups), [first]], 0))
            return self.verify(all_reduce(slots))

        tf.cond(is_due, compared, lambda: tf.constant(True))

    def _counted(self, metrics: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether the step is one that compares; and the first that was not finite, float32."""
        step = self._steps.assign_add(1, read_value=True)
        first = self._first_not_finite(step, metrics)
        return tf.equal(step % self._every_steps, 0), tf.cast(first, tf.float32)

    def _in_place(self, own: tf.Tensor) -> tf.Tensor:
        """`own` in this rank's row, and zeros in those of others."""
        return tf.one_hot(self._rank, self._num_ranks)[:, tf.newaxis] * own

    def _first_not_finite(self, step: tf.Tensor, metrics: Sequence[tf.Tensor]) -> tf.Tensor:
        """The first step in which this rank's metrics were not finite; 0 if there was none."""
        checked = [tf.reduce_all(tf.math.is_finite(m)) for m in metrics if m.dtype.is_floating]
        is_new = tf.equal(self._not_finite.read_value(), 0) & ~tf.reduce_all([True, *checked])
        return self._not_finite.assign_add(tf.where(is_new, step, 0), read_value=True)

    def verify(self, slots: tf.Tensor) -> tf.Tensor:
        """True; raises `WeightsDifferError` in the graph where `slots` of ranks, summed, differ."""
        hashes = [tf.gather(slots[:, columns], ranks) for columns, ranks in self._compared]
        told = [*hashes, slots[:, -1:]]
        differ = tf.reduce_any([tf.reduce_any(tf.not_equal(each, each[:1])) for each in told])
        return tf.cond(
            differ & (slots[0, 0] > 0),
            lambda: tf.numpy_function(self._tell, [slots, self._steps.read_value()], tf.bool),
            lambda: tf.constant(True),
        )

    def _tell(self, slots: np.ndarray, step: np.ndarray) -> np.bool_:
        not_finite = first_not_finite(slots[:, -1])
        for columns, ranks in self._compared:
            hashes = {rank: tuple(slots[rank, columns]) for rank in ranks}
            if len(set(hashes.values())) > 1:
                raise WeightsDifferError(describe(hashes, int(step), self._rank) + not_finite)
        if not self._has_warned:
            self._has_warned = True
            say(logging.WARNING, f"[rank {self._rank}]{not_finite}")
        return np.True_


def first_not_finite(steps: np.ndarray) -> str:
    """Whose metrics were the first that were not finite, by rank; 0 where they are."""
    first = int(min((step for step in steps if step), default=0))
    ranks = [rank for rank, step in enumerate(steps) if step == first]
    if not first or len(ranks) == len(steps):
        return ""
    return (
        f" The loss or a metric of rank {', '.join(map(str, ranks))} was not finite in step "
        f"{first}, before that of any other: the rows of that step or the memory of that rank "
        "are the cause."
    )


def describe(hashes: Mapping[int, tuple], step: int, rank: int) -> str:
    """Who differs from the most, by rank; of equal parties, none can be said to be wrong."""
    (most, count), *others = Counter(hashes.values()).most_common()
    wrong = [r for r, each in hashes.items() if each != most]
    ranks = ", ".join(f"rank {each}" for each in wrong)
    if others and others[0][1] == count:
        different = dict.fromkeys(hashes.values())
        parties = [[r for r, each in hashes.items() if each == h] for h in different]
        ranks = " and ".join(f"ranks {party}" for party in parties) + " from one another"
    return (
        f"Expected all ranks to hold the same weights. Received: other weights in {ranks}, in step "
        f"{step} of this process. A flipped bit in memory, an update that one rank did not make, "
        "or a weight assigned on one rank only; the last backup before may be right. (Rank "
        f"{rank} is speaking.)"
    ).replace("other weights in ranks", "different weights in ranks")


def _pieces_of(groups: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
    return tf.concat([_pieces(weights) for weights in groups], 0)


def _pieces(weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """The hash, cut into whole numbers that a float32 holds."""
    total = tf.constant(0, tf.int64)
    for weight in weights:
        total = total * _FACTOR + _sum_of_bits(weight)
    mask = (1 << _PIECE_BITS) - 1
    shifted = [tf.bitwise.right_shift(total, i * _PIECE_BITS) for i in range(_PIECES)]
    return tf.cast(
        tf.bitwise.bitwise_and(tf.stack(shifted), tf.constant(mask, tf.int64)), tf.float32
    )


def _sum_of_bits(weight: tf.Tensor) -> tf.Tensor:
    whole = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64}.get(weight.dtype.size)
    if weight.dtype == tf.bool or whole is None:
        return tf.reduce_sum(tf.cast(weight, tf.int64))
    return tf.reduce_sum(tf.cast(tf.bitcast(weight, whole), tf.int64))
