"""Values of several variables as one tensor: few operations, and one send from device to device."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals.ordered_sums import sum_in_order


def join_up(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """All of one dtype, `[numbers of all]`."""
    if all(value.shape.rank == 0 for value in values):
        return tf.stack(values)
    return tf.concat([_reshaped(value, [-1]) for value in values], 0)


def split_up(whole: tf.Tensor, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The value of each variable, of what `join_up` has made of them."""
    if all(variable.shape.rank == 0 for variable in variables):
        return tf.unstack(whole, len(variables))
    parts = tf.split(whole, [variable.shape.num_elements() for variable in variables])
    return [_reshaped(part, v.shape) for part, v in zip(parts, variables, strict=True)]


def means_by_rows(
    variables: Sequence[tf.Variable],
    values_of_each: Sequence[Sequence[tf.Tensor]],
    shares: Sequence[tuple],
) -> list[tf.Tensor]:
    """For each variable the mean of its values, weighted by rows.

    Args:
        variables: of one dtype and of known shapes, or one.
        values_of_each: for each microbatch or replica what it has of each variable.
        shares: for each of them its number of rows, and its share of all rows.
    """
    weighted = []
    for values, (rows, weight) in zip(values_of_each, shares, strict=True):
        whole = join_up(values) if len(variables) > 1 else values[0]
        present = tf.where(tf.greater(rows, 0), whole, 0)  # a mean of no rows is NaN
        weighted.append(present * tf.cast(weight, whole.dtype))
    total = sum_in_order(weighted)
    return split_up(total, variables) if len(variables) > 1 else [total]


def _reshaped(value: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Most that are joined are of one dim, and stay as they are: fewer operations to trace."""
    return value if value.shape.rank == len(shape) == 1 else tf.reshape(value, shape)
