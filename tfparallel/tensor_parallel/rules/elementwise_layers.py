"""Layers that stay in parts because they treat every number, or every channel, alike.

They have nothing to split themselves. Between a layer that gives parts and one that takes them
they are computed part by part; elsewhere as always.
"""

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras import layers

from tfparallel.internals import record
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import layer_rule, rules_of
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.rules.linear import is_elementwise_function
from tfparallel.tensor_parallel.rules.normalization import keeps_features_in_parts
from tfparallel.tensor_parallel.rules.spatial import average_pooling, max_pooling, spatial_dims

_ACTIVATIONS = (layers.ReLU, layers.LeakyReLU, layers.ELU, layers.Identity)
_MERGES = (
    layers.Add,
    layers.Subtract,
    layers.Multiply,
    layers.Average,
    layers.Maximum,
    layers.Minimum,
)
_AVERAGES = (layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D)
_MAXIMA = (layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D)
_BY_CHANNEL = (*_AVERAGES, *_MAXIMA, layers.ZeroPadding2D, layers.ZeroPadding3D)
_GLOBAL_AVERAGES = (layers.GlobalAveragePooling2D, layers.GlobalAveragePooling3D)
_GLOBAL = (
    *_GLOBAL_AVERAGES,
    layers.GlobalMaxPooling2D,
    layers.GlobalMaxPooling3D,
)


def keeps_parts(layer: keras.Layer) -> bool:
    """Whether a layer gives in parts, along channels, what it gets in parts."""
    if isinstance(layer, layers.Activation):
        return is_elementwise_function(layer.activation)
    types = (layers.Dropout, *_ACTIVATIONS, *_MERGES, *_BY_CHANNEL, *_GLOBAL)
    keeps = isinstance(layer, types) or keeps_features_in_parts(layer) or _is_depthwise(layer)
    return keeps and bool(rules_of(layer))


def _is_depthwise(layer: keras.Layer) -> bool:
    """Whether a layer convolves each channel for itself, and gives as many."""
    types = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
    return isinstance(layer, types) and layer.depth_multiplier == 1


@layer_rule(layers.Activation)
def activation(
    group: Group, layer: keras.Layer, original: Callable, inputs: tf.Tensor, **kwargs: object
) -> tf.Tensor:
    """`Activation.call` of a function of single numbers."""
    if not is_elementwise_function(layer.activation):
        return NotImplemented
    return _part_by_part(group, layer, original, inputs, **kwargs)


def _part_by_part(
    group: Group, layer: keras.Layer, original: Callable, inputs: tf.Tensor, **kwargs: object
) -> tf.Tensor:
    del layer
    rows = group.known_rows(inputs)
    if rows is None or kwargs:
        return NotImplemented
    return group.joined(group.compute(original, group.parts(inputs, rows)), rows.dim)


def _by_channel(
    group: Group, layer: keras.Layer, original: Callable, inputs: tf.Tensor
) -> tf.Tensor:
    rows = group.known_rows(inputs)
    pools = isinstance(layer, (*_AVERAGES, *_MAXIMA))
    if rows is not None and pools and rows.dim in spatial_dims(layer, inputs.shape.rank):
        pooling = average_pooling if isinstance(layer, _AVERAGES) else max_pooling
        return pooling(group, layer, inputs, rows.dim)
    if rows is None or rows.dim != _channels(layer, inputs):
        return NotImplemented
    return group.joined(group.compute(original, group.parts(inputs, rows)), rows.dim)


def _channels(layer: keras.Layer, inputs: tf.Tensor) -> int:
    last = inputs.shape.rank - 1
    return 1 if getattr(layer, "data_format", None) == "channels_first" else last


def _global(group: Group, layer: keras.Layer, original: Callable, inputs: tf.Tensor) -> tf.Tensor:
    rows = group.known_rows(inputs)
    if rows is not None and isinstance(layer, _GLOBAL_AVERAGES) and inputs.shape.rank > 3:
        dims = list(spatial_dims(layer, inputs.shape.rank))
        if rows.dim in dims and None not in [inputs.shape[d] for d in dims]:
            return _mean_of_image(group, layer, inputs, rows, dims)
    if rows is None or rows.dim != _channels(layer, inputs):
        return NotImplemented
    pooled = group.compute(original, group.parts(inputs, rows))
    return group.joined(pooled, rows.dim if layer.keepdims else 1)


def _mean_of_image(
    group: Group, layer: keras.Layer, inputs: tf.Tensor, rows: Rows, dims: list[int]
) -> tf.Tensor:
    """A global average of an image that is in parts along one of its `dims`."""
    count = math.prod(inputs.shape[d] for d in dims)
    sums = group.compute(
        lambda x: tf.reduce_sum(x, dims, keepdims=layer.keepdims), group.parts(inputs, rows)
    )
    return group.summed(sums) / tf.cast(count, inputs.dtype)


def _merge(group: Group, layer: keras.Layer, original: Callable, inputs: object) -> tf.Tensor:
    del layer
    if not isinstance(inputs, (list, tuple)):
        return NotImplemented
    if len({len(x.shape) for x in inputs}) > 1:
        return NotImplemented
    known = [group.known_rows(x) for x in inputs]
    rows = next((each for each in known if each is not None), None)
    if rows is None or any(each != rows for each in known):
        of_sequence = group.rows_of_sequence(inputs[0].shape)
        is_alike = len({tuple(x.shape) for x in inputs}) == 1
        if rows is None or rows != of_sequence or not is_alike:
            return NotImplemented  # a whole is cut only to stay in parts along positions
        if any(each not in (None, rows) for each in known):
            return NotImplemented
    parts = [group.parts(x, rows) for x in inputs]
    return group.joined(group.compute(lambda *xs: original(list(xs)), *parts), rows.dim)


@layer_rule(layers.Dropout)
def dropout(
    group: Group,
    layer: keras.Layer,
    original: Callable,
    inputs: tf.Tensor,
    training: bool | None = False,
) -> tf.Tensor:
    """`Dropout.call`: the mask that one device draws, of which each device gets its part."""
    rows = group.known_rows(inputs)
    if rows is None:
        return NotImplemented
    if not training or layer.rate <= 0:
        return inputs
    parts = group.parts(inputs, rows)
    with record.stop_recording():
        mask = original(tf.ones(_whole_shape(group, parts, rows), inputs.dtype), training=training)
        masks = group.parts(mask, rows)
    kept = group.compute(masked, parts, masks)
    return group.joined(kept, rows.dim)


def masked(x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """`x` as Dropout gives it, by what it made of ones."""
    return tf.where(mask > 0, x * tf.stop_gradient(mask), tf.zeros_like(x))


def _whole_shape(group: Group, parts: list, rows: Rows) -> Sequence[int | tf.Tensor]:
    """Of the tensor that has these parts, which is not asked: it would be computed."""
    static = rows.whole_shape(parts[0].shape)
    if None not in static:
        return static
    known = tf.shape(group.one_of(parts))
    return [known[i] if size is None else size for i, size in enumerate(static)]


for _types, _rule in (
    (_ACTIVATIONS, _part_by_part),
    (_MERGES, _merge),
    (_BY_CHANNEL, _by_channel),
    (_GLOBAL, _global),
):
    for _type in _types:
        layer_rule(_type)(_rule)
