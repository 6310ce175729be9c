"""`MultiHeadAttention` and `GroupQueryAttention` by heads.

Their query, key, value and output are `EinsumDense` layers, which have rules of their own: with
kernels `[features, heads, size]` in parts along heads they give heads in parts, and the output's
kernel `[heads, size, features]` takes them. What is between them is computed here, each device its
own heads.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals.keras_layers import gives_scores
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import layer_rule
from tfparallel.tensor_parallel.rows import Rows

_HEADS = 2  # dim of queries, keys and values `[rows, positions, heads, size]`


@layer_rule(keras.layers.MultiHeadAttention, "_compute_attention")
@layer_rule(keras.layers.GroupQueryAttention, "_compute_attention")
def attention(
    group: Group,
    layer: Any,
    original: Callable,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    training: Any = None,
    return_attention_scores: bool = False,
    **kwargs: Any,
) -> Any:
    """`MultiHeadAttention._compute_attention` of each device's heads."""
    rows = group.known_rows(query)
    drops = bool(training) and _dropout_rate(layer) > 0
    if rows is None or rows.dim != _HEADS or len(query.shape) != 4:
        return NotImplemented
    if return_attention_scores or drops or gives_scores(layer):
        return NotImplemented  # scores of all heads are asked for, or masks drawn for all

    def own_heads(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *mask: tf.Tensor) -> tf.Tensor:
        return original(q, k, v, *(mask or (None,)), training=training, **kwargs)[0]

    masks = [] if attention_mask is None else [_mask_of_heads(group, attention_mask, rows)]
    if masks == [None]:
        return NotImplemented
    heads = [group.parts(x, Rows(_HEADS, rows.sizes)) for x in (query, key, value)]
    return group.joined(group.compute(own_heads, *heads, *masks), _HEADS), None


def _dropout_rate(layer: Any) -> float:
    return float(getattr(layer, "dropout", 0.0) or 0.0)


def _mask_of_heads(group: Group, mask: Any, rows: Rows) -> Any:
    """A mask `[rows, (heads), queries, keys]` for each device; None where it cannot be told."""
    mask = tf.convert_to_tensor(mask)
    if mask.shape.rank is None or mask.shape.rank > 4:
        return None
    if mask.shape.rank < 4 or mask.shape[1] == 1:
        return mask
    heads = Rows(1, rows.sizes)
    return group.parts(mask, heads) if mask.shape[1] == sum(rows.sizes) else None
