"""`MultiHeadAttention` and `GroupQueryAttention` by heads.

Their query, key, value and output are `EinsumDense` layers, which have rules of their own: with
kernels `[features, heads, size]` in parts along heads they give heads in parts, and the output's
kernel `[heads, size, features]` takes them. What is between them is computed here, each device its
own heads.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import dropout_of_scores, gives_scores
from tfparallel.tensor_parallel.group import Group, shared_inputs
from tfparallel.tensor_parallel.layer_rules import layer_rule
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.rules.elementwise_layers import masked

_HEADS = 2  # dim of queries, keys and values `[rows, positions, heads, size]`
_HEADS_OF_SCORES = 1  # `[rows, heads, queries, keys]`


@layer_rule(keras.layers.MultiHeadAttention, "_compute_attention")
@layer_rule(keras.layers.GroupQueryAttention, "_compute_attention")
def attention(
    group: Group,
    layer: keras.Layer,
    original: Callable,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    attention_mask: Any = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    **kwargs: object,
) -> Any:
    """`MultiHeadAttention._compute_attention` of each device's heads."""
    rows = group.known_rows(query)
    if rows is None or rows.dim != _HEADS or len(query.shape) != 4:
        return NotImplemented
    if return_attention_scores or gives_scores(layer):
        return NotImplemented  # scores of all heads are asked for
    drops = bool(training) and _dropout_rate(layer) > 0

    def own_heads(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *masks: tf.Tensor) -> tf.Tensor:
        *kept, mask = masks if attention_mask is not None else (*masks, None)
        with _dropped_by(layer, *kept):
            return original(q, k, v, mask, training=training, **kwargs)[0]

    masks = [] if attention_mask is None else [_mask_of_heads(group, attention_mask, rows)]
    if masks == [None]:
        return NotImplemented
    heads = [group.parts(x, Rows(_HEADS, rows.sizes)) for x in (query, key, value)]
    if drops:
        masks = [_masks_of_scores(group, layer, heads, rows), *masks]
    return group.joined(group.compute(own_heads, *heads, *masks), _HEADS), None


@layer_rule(keras.layers.MultiHeadAttention)
@layer_rule(keras.layers.GroupQueryAttention)
def projections(
    group: Group, layer: keras.Layer, original: Callable, *args: object, **kwargs: object
) -> tuple:
    """Query, key and value of one tensor: a device sends one gradient of it."""
    del group, layer
    with shared_inputs():
        return original(*args, **kwargs)


def _dropout_rate(layer: keras.Layer) -> float:
    return float(getattr(layer, "dropout", 0.0) or 0.0)


def _masks_of_scores(group: Group, layer: keras.Layer, heads: list, rows: Rows) -> list[tf.Tensor]:
    """What one device multiplies scores `[rows, heads, queries, keys]` with, by device."""
    queries, keys, _ = map(group.one_of, heads)
    shape = [_size(queries, 0), sum(rows.sizes), _size(queries, 1), _size(keys, 1)]
    with record.stop_recording():
        whole = dropout_of_scores(layer)(tf.ones(shape, queries.dtype), training=True)
        return group.parts(whole, Rows(_HEADS_OF_SCORES, rows.sizes))


def _size(tensor: tf.Tensor, dim: int) -> int | tf.Tensor:
    return tf.shape(tensor)[dim] if tensor.shape[dim] is None else tensor.shape[dim]


def _dropped_by(layer: keras.Layer, *masks: tf.Tensor) -> contextlib.AbstractContextManager:
    """Within it, `layer` drops scores by this mask, if there is one."""
    if not masks:
        return contextlib.nullcontext()
    (mask,) = masks

    def drop(scores: tf.Tensor, training: bool | None = False) -> tf.Tensor:
        del training
        return masked(scores, tf.cast(mask, scores.dtype))

    return shadowed(
        dropout_of_scores(layer),
        "call",
        drop,
        during="a device's heads",
        why="A device drops scores of its heads by its part of the mask that one device draws.",
    )


def _mask_of_heads(group: Group, mask: tf.Tensor, rows: Rows) -> list[tf.Tensor] | tf.Tensor | None:
    """A mask `[rows, (heads), queries, keys]` for each device; None where it cannot be told."""
    mask = tf.convert_to_tensor(mask)
    if mask.shape.rank is None or mask.shape.rank > 4:
        return None
    if mask.shape.rank < 4 or mask.shape[1] == 1:
        return mask
    heads = Rows(1, rows.sizes)
    return group.parts(mask, heads) if mask.shape[1] == sum(rows.sizes) else None
