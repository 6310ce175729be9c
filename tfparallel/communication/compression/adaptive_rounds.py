"""How a step sends a bucket of gradients at the level that was chosen for it: a branch for each."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.communication.compression.buckets import Bucket, Ranks
from tfparallel.communication.compression.cast import Cast
from tfparallel.communication.compression.low_rank import NUM_PROJECTIONS, LowRank
from tfparallel.communication.compression.power_sgd import matrix_shape
from tfparallel.communication.compression.transport import (
    Reduction,
    Rounds,
    Sum,
    Transport,
)
from tfparallel.communication.joining import join, split
from tfparallel.internals import FuncGraph, run_independently


class Note:
    """What a step measures of one bucket.

    Args:
        bucket: of the step.
        num_probed: how many numbers a probing step has.

    Attributes:
        ready, done: scalars, seconds: when its gradients and when their sums were there.
        probed: `[1 + levels]`, of a probing step: the gradients' energy and the levels' errors;
            zeros otherwise.
    """

    def __init__(self, bucket: Bucket, num_probed: int):
        self.ready = self.done = time_after(bucket.tensors)
        self.probed = tf.zeros([num_probed])


def rounds_of_bucket(
    half: Cast,
    of_ranks: Sequence[int],
    bucket: Bucket,
    level: tf.Tensor,
    is_left: tf.Tensor,
    note: Note,
    transport: Transport,
) -> Rounds:
    """Sends in two sums, of as many values as the level needs, maybe none.

    So buckets of whatever levels share their collectives. Exact gradients that nothing was left out
    of go to the first sum as they are: no branch is called for them.

    Args:
        half: float16, level 1.
        of_ranks: of PowerSGD, of the levels behind it.
        bucket: gradients and their states.
        level: of the step; 0 is exact, the one behind those of ranks is the largest and probes.
        is_left: whether residuals are not zeros.
        note: is filled in.
        transport: of this rank.
    """
    if not bucket.tensors:
        return Reduction([])
    own = _Branches(half, of_ranks, bucket, level, is_left, note.probed, transport)
    *plain, first, halves = yield Sum(own.first())
    part, basis = own.second(first)
    (second,) = yield Sum([part])
    sums, residuals, queries, note.probed = own.results(plain, first, halves, basis, part, second)
    note.done = time_after(sums)
    updates = []
    for state, residual, query in zip(bucket.states, residuals, queries, strict=True):
        updates += [
            (state["residual"], tf.reshape(residual, state["residual"].shape)),
            (state["q"], query),
        ]
    sums = [tf.reshape(x, like.shape) for x, like in zip(sums, bucket.tensors, strict=True)]
    return Reduction(sums, updates, [first, halves, second])


class _Branches:
    """What is computed before, between and after the two sums, whatever the level."""

    def __init__(
        self,
        half: Cast,
        of_ranks: Sequence[int],
        bucket: Bucket,
        level: tf.Tensor,
        is_left: tf.Tensor,
        nothing_probed: tf.Tensor,
        transport: Transport,
    ):
        self._bucket = bucket
        self._nothing_probed = nothing_probed
        self._matrices = _with_residuals(bucket, is_left)
        self._queries = [state["q"].read_value() for state in bucket.states]
        self._half, self._of_ranks = half, of_ranks
        self._is_probing = tf.equal(level, 2 + len(of_ranks))
        rank = tf.gather([0, 0, *of_ranks, max(of_ranks)], level)
        num_projections = tf.where(self._is_probing, NUM_PROJECTIONS, 0)
        self._low_rank = LowRank(self._matrices, self._queries, rank, num_projections)
        self._ranks = Ranks(transport.rank, transport.world_size)
        self._is_plain = tf.equal(level, 0) & ~is_left
        self._kind = tf.where(self._is_plain, 0, 1 + tf.minimum(level, 2))

    def _branch(self, plain: Callable, exact: Callable, half: Callable, of_rank: Callable) -> tuple:
        return tf.switch_case(self._kind, [plain, exact, half, of_rank])

    def first(self) -> list[tf.Tensor]:
        """What is summed first: exact gradients as they are or nothing, then what else is sent."""
        # Slices of all or no rows: not copied.
        plain = [m[: tf.where(self._is_plain, m.shape[0], 0)] for m in self._matrices]
        no_halves = tf.zeros([0], tf.float16)

        def halves() -> tuple[tf.Tensor, tf.Tensor]:
            (payload,), _ = self._half.compress(join(self._matrices), {}, self._ranks)
            return _nothing(), payload

        sent = self._branch(
            lambda: (_nothing(), no_halves),
            lambda: (join(self._matrices), no_halves),
            halves,
            lambda: (self._low_rank.first(), no_halves),
        )
        return [*plain, *sent]

    def second(self, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """What is summed then, and what goes to `results`."""

        def nothing() -> tuple[tf.Tensor, tf.Tensor]:
            return _nothing(), _nothing()

        return self._branch(nothing, nothing, nothing, lambda: self._low_rank.second(first))

    def results(
        self,
        plain: list[tf.Tensor],
        first: tf.Tensor,
        halves: tf.Tensor,
        basis: tf.Tensor,
        part: tf.Tensor,
        second: tf.Tensor,
    ) -> tuple:
        """Sums, residuals, next queries, and what was probed, of the sums of all rounds."""

        def as_summed() -> tuple:
            # Not `ensure_shape`: TensorFlow would take that shape for what is sent in all steps.
            sums = [tf.reshape(p, m.shape) for p, m in zip(plain, self._matrices, strict=True)]
            residuals = [state["residual"].read_value() for state in self._bucket.states]
            return sums, _matrices(residuals), self._queries

        def exact() -> tuple:
            return self._whole(first, [tf.zeros(matrix.shape) for matrix in self._matrices])

        def half() -> tuple:
            payloads = [self._half.compress(m, {}, self._ranks) for m in self._matrices]
            sent = [self._half.decompress(*payload) for payload in payloads]
            total = self._half.decompress([halves], payloads[0][1])
            return self._whole(total, [m - s for m, s in zip(self._matrices, sent, strict=True)])

        def approximate() -> tuple:
            return self._low_rank.third(basis, part, second)

        def probed() -> tf.Tensor:
            ranks = self._of_ranks
            energy, errors = self._low_rank.energy_and_errors(first, basis, second, ranks)
            return tf.stack([energy, 0.0, _error_of_halves(self._matrices), *errors])

        results = self._branch(as_summed, exact, half, approximate)
        nothing = self._nothing_probed
        return *results, tf.cond(self._is_probing, probed, lambda: nothing)

    def _whole(self, total: tf.Tensor, residuals: list[tf.Tensor]) -> tuple:
        return split(total, [matrix.shape for matrix in self._matrices]), residuals, self._queries


def _nothing() -> tf.Tensor:
    return tf.zeros([0])


# Residuals are as large as weights: they are neither added nor computed while they are zeros.


def _with_residuals(bucket: Bucket, is_left: tf.Tensor) -> list[tf.Tensor]:
    """The gradients as matrices, with their residuals if these are not zeros."""

    def add() -> list[tf.Tensor]:
        pairs = zip(bucket.tensors, bucket.states, strict=True)
        return [tensor + state["residual"] for tensor, state in pairs]

    return _matrices(tf.cond(is_left, add, lambda: bucket.tensors))


def _matrices(tensors: object) -> list[tf.Tensor]:
    return [tf.reshape(each, matrix_shape(each.shape)) for each in tf.nest.flatten(tensors)]


def _error_of_halves(matrices: Sequence[tf.Tensor]) -> tf.Tensor:
    """The relative error of float16."""
    halves = [tf.cast(tf.cast(matrix, tf.float16), tf.float32) for matrix in matrices]
    pairs = zip(matrices, halves, strict=True)
    left_out = [tf.reduce_sum(tf.math.squared_difference(*pair)) for pair in pairs]
    squares = [tf.reduce_sum(tf.square(matrix)) for matrix in matrices]
    return tf.sqrt(tf.math.divide_no_nan(tf.add_n(left_out), tf.add_n(squares)))


def time_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The time in seconds when all of `tensors` are computed, float64."""
    with tf.control_dependencies(tensors):
        time = tf.timestamp()
    graph = tf.compat.v1.get_default_graph()
    if isinstance(graph, FuncGraph):  # or it would also wait for the collectives traced before
        run_independently(graph, [time.op])
    return time


def apart(branch: Callable) -> Callable:
    """`branch`, in a graph, as one operation, which a step that does not take it leaves out.

    Of branches within a step, TensorFlow goes through all that is not done: half a millisecond of
    one bucket. But one operation begins when all that it takes is there, so several buckets would
    wait for the last of them.
    """
    if tf.executing_eagerly():
        return branch
    return tf.function(branch, autograph=False, experimental_attributes={"_noinline": True})
