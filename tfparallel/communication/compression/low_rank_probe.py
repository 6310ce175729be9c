"""PowerSGD at any rank below that of its state, which can also estimate the error of each rank."""

from collections.abc import Generator, Sequence

import tensorflow as tf

from tfparallel.communication.compression.orthogonal import orthonormal_rows
from tfparallel.communication.compression.power_sgd import matrix_shape, warm_start
from tfparallel.communication.compression.transport import Sum

NUM_PROJECTIONS = 8


def low_rank_rounds(
    tensors: Sequence[tf.Tensor],
    queries: Sequence[tf.Tensor],
    rank: int,
    probed: Sequence[int] = (),
) -> Generator[Sum, list[tf.Tensor], tuple]:
    """As `PowerSGD.rounds`, with the first `rank` rows of Q^T.

    The error of a rank r is that of the sum over ranks M, which nobody has. Its projections onto
    random vectors W are cheap to sum, and tell the size of anything linear::

        |M - P_r Q_r^T|^2 / |M|^2  =  E |M W - P_r Q_r^T W|^2 / E |M W|^2

    P_r, the first r columns of P, is what P would be for rank r.

    Args:
        tensors: residuals included.
        queries: Q^T of each, `[largest rank, cols]`.
        rank: how many rows to use.
        probed: ranks, none larger than `rank`, whose errors are wanted.

    Returns:
        Sums, residuals, next queries, a scalar that is finite if all ranks' tensors are, and the
        relative errors of `probed` over all tensors, float32 `[len(probed)]`.
    """
    matrices = [tf.reshape(tensor, matrix_shape(tensor.shape)) for tensor in tensors]
    used = [query[:rank] for query in queries]
    projections = [_random_rows(NUM_PROJECTIONS if probed else 0, m.shape[1]) for m in matrices]
    sent = [
        tf.matmul(tf.concat([q, w], 0), m, transpose_b=True)
        for q, w, m in zip(used, projections, matrices, strict=True)
    ]
    received = yield Sum(sent)
    bases = [orthonormal_rows(p[:rank]) for p in received]
    own = [tf.matmul(basis, matrix) for basis, matrix in zip(bases, matrices, strict=True)]
    totals = yield Sum(own)
    sums, residuals, next_queries = [], [], []
    for i, tensor in enumerate(tensors):
        shape = tensor.shape
        sums.append(tf.reshape(tf.matmul(bases[i], totals[i], transpose_a=True), shape))
        sent_of_own = tf.matmul(bases[i], own[i], transpose_a=True)
        residuals.append(tf.reshape(matrices[i] - sent_of_own, shape))
        changed = warm_start(totals[i], used[i])
        next_queries.append(tf.concat([changed, queries[i][rank:]], 0))
    witness = tf.add_n([tf.reduce_sum(total) for total in totals])
    exact = [p[rank:] for p in received]
    errors = [
        _relative_error(
            exact,
            [
                tf.matmul(tf.matmul(w, q[:r], transpose_b=True), basis[:r])
                for w, q, basis in zip(projections, totals, bases, strict=True)
            ],
        )
        for r in probed
    ]
    return sums, residuals, next_queries, witness, tf.stack(errors) if probed else tf.zeros([0])


def _random_rows(num_rows: int, cols: int) -> tf.Tensor:
    """The same on all ranks, in every step: what is projected differs."""
    return tf.random.stateless_normal([num_rows, cols], seed=[cols, 1])


def _relative_error(exact: Sequence[tf.Tensor], approximate: Sequence[tf.Tensor]) -> tf.Tensor:
    pairs = zip(exact, approximate, strict=True)
    left_out = tf.add_n([tf.reduce_sum((e - a) ** 2) for e, a in pairs])
    return tf.sqrt(tf.math.divide_no_nan(left_out, tf.add_n([tf.reduce_sum(e**2) for e in exact])))
