"""`Embedding` by rows of its table (parts of the vocabulary) or by columns (parts of each vector).

    rows       each device looks up the tokens it has, and gives zeros for the others; their sum
    columns    each device looks up its part of every vector

The gradient is that of one device: a row for each token, not merged, so that a norm that an
optimizer takes of it is the same.

Source: the parallel embedding of Megatron-LM, https://arxiv.org/abs/1909.08053
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import record, variable_accessed
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.known_parts import joined
from tfparallel.tensor_parallel.layer_rules import is_plain_tensor, layer_rule
from tfparallel.tensor_parallel.rules.linear import is_variable
from tfparallel.tensor_parallel.split_variable import SplitVariable, split_of


@layer_rule(keras.layers.Embedding)
def embedding(group: Group, layer: Any, original: Callable, inputs: Any) -> tf.Tensor:
    """`Embedding.call`; table `[vocabulary, vector]`."""
    del original
    table = split_of(layer.embeddings) if is_variable(layer.embeddings) else None
    if table is None or group.rows(layer.embeddings) is None or not is_plain_tensor(inputs):
        return NotImplemented
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    ids = tf.where(ids < 0, ids + layer.input_dim, ids)  # as `keras.ops.take` counts
    vectors = _look_up(group, table, ids)
    if vectors.dtype == layer.compute_dtype:
        return vectors
    return tf.cast(vectors, layer.compute_dtype)


def _look_up(group: Group, table: SplitVariable, ids: tf.Tensor) -> tf.Tensor:
    with record.stop_recording():
        look_up = _by_rows if table.rows.dim == 0 else _by_columns
        vectors = look_up(group, table, ids)
    if table.trainable:
        variable = table._tape_variable()
        variable_accessed(variable)
        shape = tf.constant(table.shape.as_list(), ids.dtype)

        def backward(gradient: tf.Tensor) -> list:
            values = tf.reshape(gradient, [-1, table.shape[1]])
            return [tf.IndexedSlices(values, tf.reshape(ids, [-1]), shape)]

        record.record_operation("LookUpParts", [vectors], [variable.handle], backward)
    return vectors


def _by_rows(group: Group, table: SplitVariable, ids: tf.Tensor) -> tf.Tensor:
    parts = []
    pieces = zip(table.own_parts(), table.stored.starts, table.stored.sizes, strict=True)
    for part, start, size in pieces:
        with tf.device(part.device):
            is_own = (ids >= start) & (ids < start + size)
            vectors = tf.gather(part.read_value(), tf.where(is_own, ids - start, 0))
            parts.append(tf.where(is_own[..., None], vectors, tf.zeros_like(vectors)))
    with tf.control_dependencies([_check(ids, table.shape[0])]):
        return group.summed(parts)


def _check(ids: tf.Tensor, count: int) -> tf.Operation:
    """A token that no device has would be zeros; one device says that it is wrong."""
    is_known = tf.reduce_all((ids >= 0) & (ids < count))
    return tf.debugging.Assert(is_known, [f"Expected indices in [0, {count}). Received:", ids])


def _by_columns(group: Group, table: SplitVariable, ids: tf.Tensor) -> tf.Tensor:
    parts = []
    for part in table.own_parts():
        with tf.device(part.device):
            parts.append(tf.gather(part.read_value(), ids))
    return joined(parts, -1)
