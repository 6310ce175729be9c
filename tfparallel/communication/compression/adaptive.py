"""Compression that picks its own level, bucket by bucket, from what it measures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.adaptive_orders import (
    MOST_ROWS,
    Measurement,
    Order,
)
from tfparallel.communication.compression.adaptive_plan import MEASURED_STEPS, Controller
from tfparallel.communication.compression.adaptive_rounds import (
    Note,
    apart,
    rounds_of_bucket,
    time_after,
)
from tfparallel.communication.compression.buckets import (
    Bucket,
    BucketReducer,
    remember,
    uncompressed,
)
from tfparallel.communication.compression.cast import Cast
from tfparallel.communication.compression.compressor import num_elements
from tfparallel.communication.compression.power_sgd import PowerSGD
from tfparallel.communication.compression.transport import (
    Reduction,
    Transport,
    run_together,
)
from tfparallel.internals import (
    ResourceVariable,
)


@checks_types
class Adaptive(PowerSGD):
    """Sends each bucket of gradients exactly, as float16, or with a rank of PowerSGD.

    If steps hardly wait for exact sums, all is sent exactly. Otherwise it measures in the first
    steps, for each bucket, when its gradients are ready and how long each way takes, and estimates
    the error of each. Then it takes the ways with which a second of training is worth most: the
    cosine between the gradient and what is sent of it, over the time of a step, if a few steps show
    that none of the measured ways is better for all. Under SGD, with momentum or without, what is
    sent one step late counts as sent; under other optimizers, such as Adam, it does not. It looks
    again after 20 steps, then at intervals twice as long each time, and measures anew if times have
    changed. All ranks decide alike, from the measurements of all.

    Args:
        max_error: the largest relative error of what is sent that is allowed, `|m - sent| / |m|`,
            with m the sum over ranks of a bucket's gradients and residuals. It is measured when a
            decision is made, from eight random projections: within about a tenth. Residuals are
            sent later, so that large errors delay gradients and do not lose them. None: any.
        ranks: of PowerSGD, any order. Of vectors, and of matrices for which the largest rank saves
            nothing, gradients are sent uncompressed.
        interval: the most steps between two decisions.
    """

    has_branches = True

    def __init__(
        self,
        max_error: float | None = None,
        ranks: Sequence[int] = (4, 2, 1),
        interval: int = 500,
    ):
        if max_error is not None and not 0 <= max_error < 1:
            raise ValueError(
                "`max_error` of Adaptive must be None, or at least 0 and below 1, the error of "
                f"sending nothing. Received: {max_error!r}."
            )
        if not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"`ranks` of Adaptive must be different numbers. Received: {ranks!r}.")
        if interval < 1:
            raise ValueError(f"`interval` of Adaptive must be positive. Received: {interval!r}.")
        super().__init__(max(ranks))
        self.max_error, self.interval = max_error, interval
        self.levels: tuple[Any, ...] = (
            None,
            Cast("float16"),
            *(PowerSGD(rank) for rank in sorted(ranks, reverse=True)),
        )

    def __repr__(self) -> str:
        ranks = tuple(level.rank for level in self.levels[2:])
        bound = "" if self.max_error is None else f"max_error={self.max_error:g}, "
        return f"Adaptive({bound}ranks={ranks}, interval={self.interval})"

    def reducer(
        self, buckets: Sequence[Sequence[tuple[int, ...]]], late_counts: bool
    ) -> BucketReducer:
        """With decisions of its own for each bucket."""
        return AdaptiveReducer(self, buckets, late_counts)


class AdaptiveReducer(BucketReducer):
    """Sends each bucket at the level that a `Controller` chose.

    The step holds all levels, as branches. Python is called in measuring steps only. While exact
    steps are kept, one does what it would do without compression, and counts.
    """

    def __init__(
        self,
        adaptive: Adaptive,
        buckets: Sequence[Sequence[tuple[int, ...]]],
        late_counts: bool,
    ):
        super().__init__(name="adaptive")
        self._adaptive, self._num_buckets = adaptive, len(buckets)
        levels = adaptive.levels
        sent_bytes = [_sent_bytes(shapes, levels) for shapes in buckets]
        self._controller = Controller(
            np.array(sent_bytes, float).reshape(len(buckets), len(levels)),
            names=["uncompressed", *(repr(level) for level in levels[1:])],
            measured=sorted({0, 1, 2, len(levels) - 1}),
            probe=len(levels),
            max_error=np.inf if adaptive.max_error is None else adaptive.max_error,
            interval=adaptive.interval,
            late_counts=late_counts,
        )
        first = self._controller.order
        self._rows = ResourceVariable(_table(first), dtype=tf.int32, name="rows")
        self._countdown = ResourceVariable(first.steps, dtype=tf.int32, name="countdown")
        payload = first.payload_bytes
        self._payload_bytes = ResourceVariable(payload, dtype=tf.int32, name="payload_bytes")
        self._began_s = ResourceVariable(0.0, dtype=tf.float64, name="began_s")
        times = tf.zeros([MOST_ROWS, 2, len(buckets)], tf.float64)
        self._times_s = ResourceVariable(times, name="times_s")  # ready and done, by step
        left = tf.ones([len(buckets)], tf.bool)  # or unknown
        self._left = ResourceVariable(left, name="left")  # whether a bucket has residuals

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """What is equal on all ranks, and goes into backups."""
        return self._rows, self._countdown, self._payload_bytes, self._left

    def compressor_of(self, bucket: int) -> object:
        """What was chosen last; while it measures, what it measures."""
        level = int(self._levels()[bucket])
        return [*self._adaptive.levels, self._adaptive][level]

    def decisions(self) -> list[str]:
        """With the times and errors that they were taken from."""
        return list(self._controller.log)

    def reduce(
        self, buckets: Sequence[Bucket], plain: list[tf.Tensor], transport: Transport
    ) -> list[Reduction]:
        """As `BucketReducer.reduce`."""
        if not buckets:
            return run_together([uncompressed(plain)], [0], transport)

        def exactly() -> list[list[tf.Tensor]]:
            self._countdown.assign_sub(1, read_value=False)
            reductions = [
                uncompressed(tensors) for tensors in (*(b.tensors for b in buckets), plain)
            ]
            return [each.sums for each in run_together(reductions, starts, transport)]

        def in_levels() -> list[list[tf.Tensor]]:
            reduced = self._reduce_in_levels(buckets, plain, starts, notes, transport)
            remember(reduced)
            return [each.sums for each in reduced]

        starts = [*range(len(buckets)), len(buckets) - 1]  # as those of `Pipelined`
        # Outside: a branch begins with what is ready first.
        notes = [Note(bucket, 1 + len(self._adaptive.levels)) for bucket in buckets]
        otherwise = in_levels if len(buckets) > 1 else apart(in_levels)
        sums = tf.cond(self._is_kept_exact(), exactly, otherwise)
        return [Reduction(each) for each in sums]

    def _is_kept_exact(self) -> tf.Tensor:
        """Whether the next step has nothing to tell a controller that keeps exact steps."""
        is_exact = tf.reduce_all(tf.equal(self._rows, 0)) & ~tf.reduce_any(self._left)
        return is_exact & (self._countdown > MEASURED_STEPS)

    def _reduce_in_levels(
        self,
        buckets: Sequence[Bucket],
        plain: list[tf.Tensor],
        starts: Sequence[int],
        notes: Sequence[Note],
        transport: Transport,
    ) -> list[Reduction]:
        levels, left = tf.unstack(self._levels()), tf.unstack(self._left.read_value())
        _, half, *low_ranks = self._adaptive.levels
        of_ranks = [level.rank for level in low_ranks]
        reductions = [
            rounds_of_bucket(half, of_ranks, *each, transport)
            for each in zip(buckets, levels, left, notes, strict=True)
        ]
        reduced = run_together([*reductions, uncompressed(plain)], starts, transport)
        reduced[-1].updates.append((self._left, tf.not_equal(tf.stack(levels), 0)))
        self._advance(notes, transport)
        return reduced

    def _levels(self) -> tf.Tensor:
        """`[buckets]`, of the next step."""
        return self._rows.read_value()[(self._countdown.read_value() - 1) % MOST_ROWS]

    def _advance(self, notes: Sequence[Note], transport: Transport) -> None:
        """Asks the controller, if its time has come, and takes rank 0's answer."""
        now = tf.stack([[note.ready for note in notes], [note.done for note in notes]])
        probed = tf.concat([note.probed for note in notes], 0)
        times_s = self._times_s.assign(tf.concat([self._times_s[1:], now[tf.newaxis]], 0))

        def ask() -> tf.Tensor:
            times = [tf.reshape(times_s, [-1]), [self._began_s], *self._weighed(transport)]
            numbers = tf.concat([*times, tf.cast(probed, tf.float64)], 0)
            gathered = _gathered(numbers, transport)
            answer = tf.numpy_function(self._ask_controller, [gathered], tf.int32)
            answer.set_shape([2 + MOST_ROWS * self._num_buckets])
            # They are equal, unless one of the ranks was restarted.
            answer = _gathered(answer, transport)[0]
            self._countdown.assign(answer[0], read_value=False)
            self._payload_bytes.assign(answer[1], read_value=False)
            self._rows.assign(tf.reshape(answer[2:], self._rows.shape), read_value=False)
            self._began_s.assign(time_after([answer]), read_value=False)
            return tf.constant(True)

        left = self._countdown.assign_sub(1)
        tf.cond(left <= 0, ask, lambda: tf.constant(False))

    def _weighed(self, transport: Transport) -> list[tf.Tensor]:
        """The payload's bytes, seconds of the smallest sum, `[1]`, and of two payloads, `[2]`.

        One more sum before them makes all come together.
        """
        size = self._payload_bytes.read_value()

        def weigh() -> list[tf.Tensor]:
            times, ended_s = [], size
            for values in (1, 1, size // 4, size // 4):
                # Not behind the sum alone: one thread would look at the clock after all sums.
                with tf.control_dependencies([ended_s]):
                    payload = tf.zeros([values])
                began_s = time_after([payload])
                with tf.control_dependencies([began_s]):
                    sums = transport.all_reduce_sum([tf.identity(payload)])
                ended_s = time_after(sums)
                times.append(ended_s - began_s)
            return [tf.stack(times[1:2]), tf.stack(times[2:])]

        nothing = [tf.zeros([number], tf.float64) for number in (1, 2)]
        taken = tf.cond(size > 0, weigh, lambda: nothing)
        return [tf.cast(size, tf.float64)[tf.newaxis], *taken]

    def _ask_controller(self, gathered: np.ndarray) -> np.ndarray:
        ranks, shape = len(gathered), [MOST_ROWS, 2, self._num_buckets]
        ends = np.cumsum([np.prod(shape), 1, 1, 1, 2])
        times, began, size, trip, payload, probed = np.split(gathered, ends, 1)
        ready_s, done_s = np.moveaxis(times.reshape(ranks, *shape), 2, 0)
        probed = probed.reshape(ranks, self._num_buckets, -1)
        ended = np.max(done_s[:, -1], 1)
        measurement = Measurement(
            ready_s=ready_s,
            done_s=done_s,
            errors=probed[:, :, 1:],
            energies=probed[:, :, 0],
            began_s=np.where(began[:, 0] > 0, began[:, 0], ended),  # the first step was traced
            payload_bytes=int(size[0, 0]),
            trip_s=trip[:, 0],
            payload_s=payload,
        )
        num_lines = len(self._controller.log)
        order = self._controller.advance(measurement)
        for line in self._controller.log[num_lines:]:
            tf.get_logger().info("Adaptive compression, %s.", line)
        return np.array([order.steps, order.payload_bytes, *_table(order).reshape(-1)], "int32")


def _table(order: Order) -> np.ndarray:
    """`[MOST_ROWS, buckets]`: row `(left - 1) % MOST_ROWS` is for a step with `left` to do."""
    lefts = range(1, MOST_ROWS + 1)
    return np.array([order.rows[(order.steps - left) % len(order.rows)] for left in lefts], "int32")


def _sent_bytes(shapes: Sequence[tuple[int, ...]], levels: Sequence) -> list[int]:
    """What each level sends of a bucket."""
    exact = sum(4 * num_elements(shape) for shape in shapes)
    return [exact, *(sum(map(level.payload_bytes, shapes)) for level in levels[1:])]


def _gathered(numbers: tf.Tensor, transport: Transport) -> tf.Tensor:
    """`[world_size, *shape]`."""
    shape = [transport.world_size, *numbers.shape, numbers.dtype.size]
    (gathered,) = transport.all_gather([tf.reshape(tf.bitcast(numbers, tf.uint8), [-1])])
    return tf.bitcast(tf.reshape(gathered, shape), numbers.dtype)
