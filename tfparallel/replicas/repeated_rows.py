"""Rows of a table that every replica reads alike, such as those of positions.

The gradient of `Embedding(arange(length))` has, on one device, an entry for each position: the sum
over all rows of the batch. Each replica gives as many entries, of the same positions. Were they
kept apart, as the entries of words are, an optimizer that squares them (Adam, RMSprop, ...) would
add up the squares of the replicas' sums, where one device squares the sum of all.

Which entries are alike is told by the graph, so not where a step runs eagerly; nor where one table
is read both ways in a step.
"""

from collections.abc import Mapping

import tensorflow as tf

from tfparallel.internals.graphs import is_stateful

_NO_OUTER: Mapping[int, tf.Tensor] = {}


def added_up(
    own: tf.Tensor | tf.IndexedSlices, total: tf.Tensor | tf.IndexedSlices
) -> tf.Tensor | tf.IndexedSlices:
    """The gradient of all rows, with one entry where one device has one.

    Args:
        own: the calling replica's gradient, a tensor or IndexedSlices.
        total: of all replicas; where both are IndexedSlices, their entries one after the other.
    """
    if not (isinstance(own, tf.IndexedSlices) and isinstance(total, tf.IndexedSlices)):
        return total
    if tf.executing_eagerly() or not is_of_no_row(own.indices):
        return total
    shape = tf.concat([[-1], tf.shape(own.values)], 0)
    values = tf.reduce_sum(tf.reshape(total.values, shape), 0)
    values.set_shape(own.values.shape)
    indices = tf.cast(own.indices, total.indices.dtype)
    return tf.IndexedSlices(values, indices, total.dense_shape)


def is_of_no_row(value: tf.Tensor, outer: Mapping[int, tf.Tensor] = _NO_OUTER) -> bool:
    """Whether a tensor of a graph is made of constants and lengths of rows alone.

    Args:
        outer: what stands for placeholders of the graph in the one around it, by their `id`.
    """
    stack, seen = [value], set()
    while stack:
        tensor = stack.pop()
        if id(tensor) in outer:
            stack.append(outer[id(tensor)])
            continue
        operation = tensor.op
        if operation in seen or operation.type == "VariableShape" or _is_length(operation):
            continue
        seen.add(operation)
        if is_stateful(operation) or (not operation.inputs and operation.type != "Const"):
            return False
        stack += operation.inputs
    return True


def known_length(operation: tf.Operation) -> int | None:
    """What an operation gives that takes the size of one dimension that is not the rows, if known.

    It is known before the step runs where the shape says it.
    """
    is_one = _is_length(operation) and operation.get_attr("shrink_axis_mask") == 1
    if not is_one or operation.outputs[0].shape.rank != 0:
        return None
    (dimension,) = tf.get_static_value(operation.inputs[1])
    sizes = operation.inputs[0].op.inputs[0].shape
    return None if sizes.rank is None else sizes[dimension]


def _is_length(operation: tf.Operation) -> bool:
    """Whether it takes from a shape sizes of dimensions that are not the rows."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(operation.inputs[1])
    return begin is not None and bool((begin >= 1).all())
