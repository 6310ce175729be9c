"""How a large variable is cut into parts, each on a parameter server of its own.

A part is a range of rows: the first dim of an Embedding's table is its vocabulary, and a batch
touches rows.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf


def rows_of_parts(num_rows: int, num_parts: int) -> list[tuple[int, int]]:
    """First row and end of each part: sizes that differ by one row at most."""
    num_parts = max(1, min(num_parts, num_rows))
    ends = [num_rows * (part + 1) // num_parts for part in range(num_parts)]
    return list(zip([0, *ends], ends, strict=False))


def num_parts(partitioner: Callable | None, shape: tf.TensorShape, dtype: tf.DType) -> int:
    """Into how many parts `partitioner` cuts a variable.

    Raises:
        ValueError: for one that cuts another dim than the first, or gives no numbers from 1.
    """
    if partitioner is None or not shape.rank or not shape.is_fully_defined():
        return 1
    counts = list(partitioner(shape, dtype))
    if (
        len(counts) != shape.rank
        or any(count < 1 for count in counts)
        or max(counts[1:] or [1]) > 1
    ):
        raise ValueError(
            "variable_partitioner must give one number from 1 for each dim, and cut the first dim "
            f"only. Received: {counts} for a variable of shape {tuple(shape)}."
        )
    return counts[0]


def cut_rows(value: tf.Tensor | tf.IndexedSlices, parts: Sequence[tuple[int, int]]) -> list:
    """`value`, of a variable's shape, cut like the variable; rows of slices count from the part."""
    if not isinstance(value, tf.IndexedSlices):
        return [value[start:end] for start, end in parts]
    return [_slices_between(value, start, end) for start, end in parts]


def _slices_between(slices: tf.IndexedSlices, start: int, end: int) -> tf.IndexedSlices:
    is_inside = (slices.indices >= start) & (slices.indices < end)
    indices = tf.boolean_mask(slices.indices, is_inside) - tf.cast(start, slices.indices.dtype)
    values = tf.boolean_mask(slices.values, is_inside)
    shape = tf.concat([[end - start], tf.shape(slices.values)[1:]], 0)
    return tf.IndexedSlices(values, indices, shape)
