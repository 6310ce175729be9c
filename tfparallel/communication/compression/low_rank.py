"""PowerSGD at any rank below that of its state, which can also estimate the error of each rank."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.communication.compression.orthogonal import orthonormal_rows_of_each
from tfparallel.communication.compression.power_sgd import warm_start
from tfparallel.communication.joining import join, split
from tfparallel.internals.ordered_sums import sum_in_order

NUM_PROJECTIONS = 8


class LowRank:
    """What every rank computes for `PowerSGD.rounds`, with the first `rank` rows of Q^T.

    Before, between and after two sums over ranks: `first`, `second`, `third`. What is sent are flat
    vectors.

    The error of a rank r is that of the sum over ranks M, which nobody has. Its projections onto
    random vectors W are cheap to sum, and tell the size of anything linear::

        |M - P_r Q_r^T|^2 / |M|^2  =  E |M W - P_r Q_r^T W|^2 / E |M W|^2

    P_r, the first r columns of P, is what P would be for rank r.

    Args:
        matrices: residuals included.
        queries: Q^T of each, `[largest rank, cols]`.
        rank: how many rows to use.
        probed: ranks, none larger than `rank`, whose errors are wanted.
    """

    def __init__(
        self,
        matrices: Sequence[tf.Tensor],
        queries: Sequence[tf.Tensor],
        rank: int,
        probed: Sequence[int] = (),
    ):
        self._matrices, self._queries = matrices, queries
        self._rank, self._probed = rank, probed
        self._num_sent = rank + (NUM_PROJECTIONS if probed else 0)

    def first(self) -> tf.Tensor:
        """P^T, and M W where errors are wanted."""
        sent = [
            tf.matmul(tf.concat([query[: self._rank], w], 0), matrix, transpose_b=True)
            for matrix, query, w in zip(
                self._matrices, self._queries, self._projections(), strict=True
            )
        ]
        return join(sent)

    def second(self, received: tf.Tensor) -> tf.Tensor:
        """This rank's part of Q^T, from the sum of `first`."""
        pairs = zip(self._bases(received), self._matrices, strict=True)
        return join([tf.matmul(basis, matrix) for basis, matrix in pairs])

    def third(self, received: tf.Tensor, own: tf.Tensor, total: tf.Tensor) -> tuple:
        """The result.

        Args:
            received: the sum of `first`.
            own, total: of `second`, and its sum.

        Returns:
            Sums, residuals, next queries, the energy `|M W|^2` of all tensors, and the relative
            errors of `probed` over them, float32 `[]` and `[len(probed)]`.
        """
        bases = self._bases(received)
        shapes = [[self._rank, matrix.shape[1]] for matrix in self._matrices]
        totals, owns = split(total, shapes), split(own, shapes)
        sums = [tf.matmul(p, q, transpose_a=True) for p, q in zip(bases, totals, strict=True)]
        residuals = [
            matrix - tf.matmul(p, q, transpose_a=True)
            for matrix, p, q in zip(self._matrices, bases, owns, strict=True)
        ]
        queries = [
            tf.concat([warm_start(q, before[: self._rank]), before[self._rank :]], 0)
            for q, before in zip(totals, self._queries, strict=True)
        ]
        return sums, residuals, queries, *self._energy_and_errors(received, bases, totals)

    def _bases(self, received: tf.Tensor) -> list[tf.Tensor]:
        return orthonormal_rows_of_each([p[: self._rank] for p in self._received(received)])

    def _received(self, received: tf.Tensor) -> list[tf.Tensor]:
        return split(received, [[self._num_sent, m.shape[0]] for m in self._matrices])

    def _projections(self) -> list[tf.Tensor]:
        """W^T: the same on all ranks, in every step: what is projected differs."""
        rows = self._num_sent - self._rank
        return [
            tf.random.stateless_normal([rows, m.shape[1]], seed=[m.shape[1], 1])
            for m in self._matrices
        ]

    def _energy_and_errors(self, received: tf.Tensor, bases: list, totals: list) -> tuple:
        if not self._probed:
            return tf.zeros([]), tf.zeros([0])
        exact = [p[self._rank :] for p in self._received(received)]
        energy = sum_in_order([tf.reduce_sum(e**2) for e in exact])
        factors = list(zip(self._projections(), totals, bases, strict=True))
        errors = []
        for r in self._probed:
            sent = [tf.matmul(tf.matmul(w, q[:r], transpose_b=True), p[:r]) for w, q, p in factors]
            left_out = [tf.reduce_sum((e - s) ** 2) for e, s in zip(exact, sent, strict=True)]
            errors.append(tf.sqrt(tf.math.divide_no_nan(sum_in_order(left_out), energy)))
        return energy, tf.stack(errors)
