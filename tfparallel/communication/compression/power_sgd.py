"""Gradients of low rank: two thin factors travel instead of a matrix."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.buckets import Ranks, State
from tfparallel.communication.compression.compressor import Compressor, with_residual
from tfparallel.communication.compression.orthogonal import (
    orthonormal_rows,
    orthonormal_rows_of_each,
)
from tfparallel.communication.compression.transport import Reduction, Rounds, Sum


@checks_types
class PowerSGD(Compressor):
    """Approximates the sum of all ranks' gradients by a matrix of low rank.

    One step of subspace iteration, begun where the last step ended (warm start)::

        M_i = gradient + residual          n x m, of rank i
        P   = sum_i M_i Q                  n x r, all-reduced, then orthonormalised
        Q   = sum_i M_i^T P                m x r, all-reduced; remembered for the next step
        result = P Q^T                     equal on all ranks
        residual = M_i - P P^T M_i         what of M_i the result does not hold

    Both sums are linear, so that a ring can add them: `4 r (n + m) * 2 (N - 1) / N` bytes for each
    rank. A gradient of more than two dims is cut where `n + m` is smallest. Vectors, and matrices
    with `(n + m) r >= n m`, are sent uncompressed, together.

    Differs from the paper, and from torch's hook, in the residual: they take `M_i - P Q^T / N`. The
    sum over ranks is the same, but ours holds no difference between ranks inside of the space of P,
    which would add up over steps.

    Args:
        rank: r, the rank of the approximation, at least 1. More is more exact, and slower.

    Source: PowerSGD, Vogels et al., https://arxiv.org/abs/1905.13727.
    """

    has_error_feedback = True

    def __init__(self, rank: int = 4):
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(
                f"`rank` of PowerSGD must be an int of at least 1. Received: {rank!r}."
            )
        self.rank = rank

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank})"

    @property
    def sends_sums(self) -> bool:
        """True: both rounds are sums, although the two factors of `compress` are not linear."""
        return True

    def applies_to(self, shape: Sequence[int]) -> bool:
        """Matrices for which it saves anything."""
        if len(shape) < 2 or 0 in shape:
            return False
        rows, cols = matrix_shape(shape)
        return (rows + cols) * self.rank < rows * cols

    def initial_state(self, shape: Sequence[int], seed: int) -> dict[str, tf.Tensor]:
        """The residual, and Q^T `[rank, cols]`: random, the same on all ranks."""
        _, cols = matrix_shape(shape)
        q = tf.random.stateless_normal([self.rank, cols], seed=[seed, 0])
        return {**super().initial_state(shape, seed), "q": q}

    def compress(
        self, tensor: tf.Tensor, state: Mapping[str, tf.Variable], ranks: Ranks
    ) -> tuple[list[tf.Tensor], Any]:
        """Both factors of one tensor by itself, for a parameter server. Rings use `rounds`."""
        del ranks
        matrix = tf.reshape(tensor, matrix_shape(tensor.shape))
        p = orthonormal_rows(tf.matmul(state["q"], matrix, transpose_b=True))
        return [p, tf.matmul(p, matrix)], tensor.shape

    def decompress(self, payload: Sequence[tf.Tensor], context: Any) -> tf.Tensor:
        """The product of both factors."""
        return tf.reshape(tf.matmul(payload[0], payload[1], transpose_a=True), context)

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Of both factors."""
        return 4 * self.rank * sum(matrix_shape(shape))

    def rounds(self, tensors: Sequence[tf.Tensor], states: Sequence[State], ranks: Ranks) -> Rounds:
        """The approximate sum over ranks, in two sums of thin matrices."""
        del ranks
        matrices = [
            tf.reshape(with_residual(tensor, state), matrix_shape(tensor.shape))
            for tensor, state in zip(tensors, states, strict=True)
        ]
        # Factors lie as rows: on a CPU twice as fast as columns.
        pairs = list(zip(states, matrices, strict=True))
        p = yield Sum([tf.matmul(s["q"], matrix, transpose_b=True) for s, matrix in pairs])
        p = orthonormal_rows_of_each(p)
        q_own = [tf.matmul(p_i, matrix) for p_i, matrix in zip(p, matrices, strict=True)]
        q = yield Sum(q_own)
        sums, updates = [], []
        for i, state in enumerate(states):
            shape = tensors[i].shape
            sums.append(self.decompress([p[i], q[i]], shape))
            own = self.decompress([p[i], q_own[i]], shape)
            updates.append((state["residual"], tf.reshape(matrices[i], shape) - own))
            updates.append((state["q"], warm_start(q[i], state["q"])))
        return Reduction(sums, updates, witnesses=q)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: cut between two dims, where their sum is least."""
    sizes = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(sizes, key=sum)


def warm_start(q: tf.Tensor, before: tf.Tensor, largest: tf.Tensor | None = None) -> tf.Tensor:
    """Where the next step begins: with rows of size 1, and the old ones instead of zeros.

    Args:
        q: `[rank, cols]`, of this step.
        before: what this step began with.
        largest: what each row is divided by. Default: the largest of its absolute values.
    """
    if largest is None:
        largest = tf.reduce_max(tf.abs(q), 1, keepdims=True)
    return tf.where(largest > 0, tf.math.divide_no_nan(q, largest), before)
