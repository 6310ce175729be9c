"""PowerSGD at any rank below that of its state, which can also estimate the error of each rank."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfparallel.communication.compression.orthogonal import orthonormal_rows_of_each
from tfparallel.communication.compression.power_sgd import warm_start
from tfparallel.internals.ordered_sums import sum_in_order

NUM_PROJECTIONS = 8


class LowRank:
    """What every rank computes for `PowerSGD.rounds`, with the first `rank` rows of Q^T.

    Before, between and after two sums over ranks: `first`, `second`, `third`. Thin factors of all
    matrices lie side by side, `[rank, sum of sizes]`, and are sent as flat vectors. So whatever the
    rank, and however many the matrices, there are few operations: what a step calls for the first
    time, TensorFlow has to prepare.

    The error of a rank r is that of the sum over ranks M, which nobody has. Its projections onto
    random vectors W are cheap to sum, and tell the size of anything linear::

        |M - P_r Q_r^T|^2 / |M|^2  =  E |M W - P_r Q_r^T W|^2 / E |M W|^2

    P_r, the first r columns of P, is what P would be for rank r.

    Args:
        matrices: residuals included.
        queries: Q^T of each, `[largest rank, cols]`.
        rank: how many rows to use, a scalar.
        num_projections: `NUM_PROJECTIONS` where errors are wanted, or 0; a scalar.
    """

    def __init__(
        self,
        matrices: Sequence[tf.Tensor],
        queries: Sequence[tf.Tensor],
        rank: tf.Tensor,
        num_projections: tf.Tensor,
    ):
        self._matrices, self._queries = matrices, queries
        self._rank, self._num_projections = rank, num_projections
        self._rows = [matrix.shape[0] for matrix in matrices]
        self._cols = [matrix.shape[1] for matrix in matrices]

    def first(self) -> tf.Tensor:
        """P^T, and M W where errors are wanted."""
        queries = tf.concat([self._query()[: self._rank], self._projections()], 0)
        pairs = zip(tf.split(queries, self._cols, 1), self._matrices, strict=True)
        return _flat([tf.matmul(query, matrix, transpose_b=True) for query, matrix in pairs])

    def second(self, received: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """This rank's part of Q^T, from the sum of `first`; and P^T, orthonormalised."""
        summed = _side_by_side(received, self._rows)[: self._rank]
        bases = orthonormal_rows_of_each(tf.split(summed, self._rows, 1))
        pairs = zip(bases, self._matrices, strict=True)
        return _flat([tf.matmul(basis, matrix) for basis, matrix in pairs]), _flat(bases)

    def third(self, basis: tf.Tensor, own: tf.Tensor, total: tf.Tensor) -> tuple:
        """Sums, residuals and next queries.

        Args:
            basis: P^T of `second`.
            own, total: Q^T of `second`, and its sum.
        """
        bases = _parts(basis, self._rows)
        totals, owns = _parts(total, self._cols), _parts(own, self._cols)
        sums = [tf.matmul(p, q, transpose_a=True) for p, q in zip(bases, totals, strict=True)]
        residuals = [
            matrix - tf.matmul(p, q, transpose_a=True)
            for matrix, p, q in zip(self._matrices, bases, owns, strict=True)
        ]
        largest = tf.concat([tf.reduce_max(tf.abs(q), 1, keepdims=True) for q in totals], 1)
        largest = tf.gather(largest, np.repeat(range(len(self._cols)), self._cols), axis=1)
        before, query = self._query(), _side_by_side(total, self._cols)
        begun = warm_start(query, before[: self._rank], largest)
        after = tf.concat([begun, before[self._rank :]], 0)
        return sums, residuals, tf.split(after, self._cols, 1)

    def energy_and_errors(
        self, received: tf.Tensor, basis: tf.Tensor, total: tf.Tensor, ranks: Sequence[int]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """`|M W|^2` of all tensors, and over them the relative errors of `ranks`.

        Args:
            received: the sum of `first`.
            basis, total: as in `third`.
            ranks: none larger than that of this.
        """
        exact = tf.split(_side_by_side(received, self._rows)[self._rank :], self._rows, 1)
        energy = sum_in_order([tf.reduce_sum(tf.square(e)) for e in exact])
        projections = tf.split(self._projections(), self._cols, 1)
        pairs = zip(projections, _parts(total, self._cols), strict=True)
        factors = [tf.matmul(w, q, transpose_b=True) for w, q in pairs]
        bases = _parts(basis, self._rows)
        errors = []
        for rank in ranks:
            sent = [tf.matmul(f[:, :rank], p[:rank]) for f, p in zip(factors, bases, strict=True)]
            both = zip(exact, sent, strict=True)
            left_out = [tf.reduce_sum(tf.math.squared_difference(*each)) for each in both]
            errors.append(tf.sqrt(tf.math.divide_no_nan(sum_in_order(left_out), energy)))
        return energy, errors

    def _query(self) -> tf.Tensor:
        return tf.concat(self._queries, 1)

    def _projections(self) -> tf.Tensor:
        """W^T of all: the same on all ranks, in every step: what is projected differs."""
        shape = [self._num_projections, sum(self._cols)]
        return tf.random.stateless_normal(shape, seed=[sum(self._cols), 1])


def _flat(factors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Factors `[rank, size]` of each matrix as one vector."""
    return tf.reshape(tf.concat(factors, 1), [-1])


def _side_by_side(flat: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    return tf.reshape(flat, [-1, sum(sizes)])


def _parts(flat: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    return tf.split(_side_by_side(flat, sizes), sizes, 1)
