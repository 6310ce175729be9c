"""`Embedding` by rows of its table (parts of the vocabulary) or by columns (parts of each vector).

    rows       each device looks up the tokens it has, and gives zeros for the others; their sum
    columns    each device looks up its part of every vector

The gradient is that of one device: a row for each token, not merged, so that a norm that an
optimizer takes of it is the same.

Source: the parallel embedding of Megatron-LM, https://arxiv.org/abs/1909.08053
"""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import keras_integers, record, set_keras_mask, variable_accessed
from tfparallel.replicas.device_names import hosts_of
from tfparallel.segments.differentiated_graphs import is_of_segment
from tfparallel.tensor_parallel.exchanges import scatter_sum
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.known_parts import joined
from tfparallel.tensor_parallel.layer_rules import is_plain_tensor, layer_rule
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.rules.linear import Linear, compute_linear, is_variable
from tfparallel.tensor_parallel.split_variable import SplitVariable, split_of


@layer_rule(keras.layers.Embedding)
def embedding(group: Group, layer: keras.Layer, original: Callable, inputs: tf.Tensor) -> tf.Tensor:
    """`Embedding.call`; table `[vocabulary, vector]`."""
    del original
    table = split_of(layer.embeddings) if is_variable(layer.embeddings) else None
    if table is None or group.rows(layer.embeddings) is None or not is_plain_tensor(inputs):
        return NotImplemented
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    vectors = _look_up(group, table, ids)
    if vectors.dtype == layer.compute_dtype:
        return vectors
    return tf.cast(vectors, layer.compute_dtype)


@layer_rule(keras.layers.ReversibleEmbedding)
def reversible_embedding(
    group: Group, layer: keras.Layer, original: Callable, inputs: object, reverse: bool = False
) -> tf.Tensor:
    """`ReversibleEmbedding.call`; table `[vocabulary, vector]`, logits `[..., vocabulary]`."""
    if reverse:
        return _logits(group, layer, inputs)
    vectors = embedding(group, layer, original, inputs)
    mask = keras.layers.Embedding.compute_mask(layer, inputs)
    if mask is not None and vectors is not NotImplemented:
        set_keras_mask(vectors, mask)
    return vectors


def _logits(group: Group, layer: keras.Layer, inputs: tf.Tensor) -> tf.Tensor:
    kernel = layer.embeddings if layer.tie_weights else layer.reverse_embeddings
    rows = group.rows(kernel) if is_variable(kernel) and is_plain_tensor(inputs) else None
    if rows is None:
        return NotImplemented
    vocabulary, last = 0 if layer.tie_weights else 1, inputs.shape.rank - 1
    is_column = rows.dim == vocabulary

    def multiply(x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        weight = tf.transpose(weight) if layer.tie_weights else weight
        if layer.reverse_dtype is not None:
            x, weight = tf.cast(x, layer.reverse_dtype), tf.cast(weight, layer.reverse_dtype)
        logits = keras.ops.matmul(x, weight)
        return _capped(layer, logits) if is_column else logits

    linear = Linear(
        multiply,
        kernel,
        bias=None,
        activation=None,
        input_dim=None if is_column else last,
        output_dim=last if is_column else None,
        bias_dim=None,
    )
    logits = compute_linear(group, inputs, linear)
    return logits if is_column else _capped(layer, logits)


def _capped(layer: keras.Layer, logits: tf.Tensor) -> tf.Tensor:
    cap = layer.logit_soft_cap
    return logits if cap is None else tf.tanh(logits / cap) * cap


def _look_up(group: Group, table: SplitVariable, ids: tf.Tensor) -> tf.Tensor:
    """The vectors of tokens; negative ones count from the end, as in `keras.ops.take`."""
    count, is_by_rows, rows = table.shape[0], table.rows.dim == 0, None
    with record.stop_recording():
        checks = index_checks(group, ids, count, least=-count) if is_by_rows else []
        ids = tf.cast(ids, tf.int64)  # GPUs subtract int32 on the host
        ids = tf.where(ids < 0, ids + count, ids)
        unknown = None if checks or not is_by_rows else (ids < 0) | (ids >= count)
    if is_by_rows and ids.shape.rank == 2:
        rows = group.rows_of_sequence([*ids.shape, table.shape[1]])
    if rows is not None:
        with tf.control_dependencies(checks):
            return _look_up_by_positions(group, table, ids, rows, unknown)
    with record.stop_recording(), tf.control_dependencies(checks):
        if is_by_rows:
            vectors = group.summed(_own_vectors(table, ids, unknown))
        else:
            vectors = _by_columns(group, table, ids)
    _record_look_up(table, ids, [vectors], lambda gradient: gradient)
    return vectors


def _look_up_by_positions(
    group: Group, table: SplitVariable, ids: tf.Tensor, rows: Rows, unknown: tf.Tensor | None
) -> tf.Tensor:
    """Vectors in parts along positions, of which each device gets its own."""
    with record.stop_recording():
        terms = _own_vectors(table, ids, unknown)
        parts = scatter_sum(terms, rows, group.devices)
    _record_look_up(table, ids, parts, lambda *gradients: joined(gradients, rows.dim))
    return joined(parts, rows.dim)


def _record_look_up(
    table: SplitVariable, ids: tf.Tensor, outputs: list[tf.Tensor], whole: Callable
) -> None:
    """Tells tapes of it; the gradient has a row for each token."""
    if table.trainable:
        variable = table._tape_variable()
        variable_accessed(variable)
        shape = tf.constant(table.shape.as_list(), ids.dtype)

        def backward(*gradients: tf.Tensor) -> list:
            values = tf.reshape(whole(*gradients), [-1, table.shape[1]])
            return [tf.IndexedSlices(values, tf.reshape(ids, [-1]), shape)]

        record.record_operation("LookUpParts", outputs, [variable.handle], backward)


def _own_vectors(
    table: SplitVariable, ids: tf.Tensor, unknown: tf.Tensor | None
) -> list[tf.Tensor]:
    """Of the tokens that each device has, and zeros for others; on the first, NaN of `unknown`."""
    parts = []
    pieces = zip(table.read_stored(), table.stored.starts, table.stored.sizes, strict=True)
    for part, start, size in pieces:
        with tf.device(part.device):
            is_own = (ids >= start) & (ids < start + size)
            vectors = tf.gather(part, tf.where(is_own, ids - start, 0))
            parts.append(tf.where(is_own[..., None], vectors, tf.zeros_like(vectors)))
    if unknown is not None:
        with tf.device(parts[0].device):
            nan = tf.constant(np.nan, parts[0].dtype)
            parts[0] = tf.where(unknown[..., None], nan, parts[0])
    return parts


def index_checks(group: Group, ids: tf.Tensor, count: int, least: int = 0) -> list[tf.Operation]:
    """What no device has would count as zeros; the host says that it is wrong, if it has `ids`.

    A GPU has no strings: asked for there, the message is an error without soft placement. What
    comes from the batch is looked at as it came, on the host: who waits for the check waits for no
    GPU.

    Returns:
        The check; none where `ids` are on a GPU, which a stage was given or a model has computed.
        What is looked up for unknown ones is NaN there, as TensorFlow's own cross entropy is.
    """
    if _are_on_gpus(group, ids):
        return []
    host = hosts_of([ids.device])[0]
    given = _as_given(ids) if tf.is_symbolic_tensor(ids) else ids  # which a function captures
    with tf.device(host):
        is_known = tf.reduce_all((given >= least) & (given < count))
        message = f"Expected indices in [0, {count}). Received:"
        return [tf.debugging.Assert(is_known, [message, given])]


def _are_on_gpus(group: Group, ids: tf.Tensor) -> bool:
    """Whether a stage on GPUs was given `ids`, which it gets there, or a GPU makes them."""
    if not tf.is_symbolic_tensor(ids) or not keras_integers.has_gpu(group.devices):
        return False
    given = _as_given(ids)
    if given.op.type == "Placeholder":
        return is_of_segment(given.graph)
    return given.op.type != "Const" and given.device in ("", *group.devices)


def _as_given(ids: tf.Tensor) -> tf.Tensor:
    """The integers that `ids` were, before they were cast, copied to a device or shaped."""
    before = ids
    while before.op.type in {"Cast", "Identity", "Squeeze", "Reshape"}:
        before = before.op.inputs[0]
        if before.dtype in (tf.int32, tf.int64):
            ids = before
    return ids


def _by_columns(group: Group, table: SplitVariable, ids: tf.Tensor) -> tf.Tensor:
    parts = []
    for part in table.read_stored():
        with tf.device(part.device):
            parts.append(tf.gather(part, ids))
    return joined(parts, -1)
