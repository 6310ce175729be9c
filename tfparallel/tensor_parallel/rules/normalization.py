"""`LayerNormalization`, `RMSNormalization` and `BatchNormalization` of features in parts.

    batch norm             each device has all that its features need: nothing is sent
    layer and RMS norm     each device sends the moments of its features, a number or two for each
                           position, and gets those of all

Where features are whole on each device, and something else is in parts (heads), every device
normalises its own.

Source of how moments are joined: Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances".
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras import layers

from tfparallel.internals.keras_layers import moments_of
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import is_plain_tensor, layer_rule
from tfparallel.tensor_parallel.rows import Rows

_TYPES = (layers.LayerNormalization, layers.RMSNormalization, layers.BatchNormalization)


def keeps_features_in_parts(layer: keras.Layer) -> bool:
    """Whether a layer normalises features in parts, of a single dim."""
    if not isinstance(layer, _TYPES):
        return False
    plain = not getattr(layer, "rms_scaling", False) and not getattr(layer, "renorm", False)
    return plain and len(_axes(layer, 0)) == 1


def numbers_sent(layer: keras.Layer) -> int:
    """How many moments of a position each device sends."""
    return next(
        (n for kind, n in ((_TYPES[0], 2), (_TYPES[1], 1)) if isinstance(layer, kind)),
        0,
    )


@layer_rule(layers.LayerNormalization)
def layer_normalization(
    group: Group, layer: keras.Layer, original: Callable, inputs: tf.Tensor
) -> tf.Tensor:
    """`LayerNormalization.call`."""
    del original
    rows = group.known_rows(inputs) if is_plain_tensor(inputs) else None
    if rows is None or layer.rms_scaling:
        return NotImplemented
    weights = [layer.gamma, layer.beta]
    axes = _axes(layer, inputs.shape.rank)
    if rows.dim not in axes:
        return _each_its_own(
            group,
            lambda x, *w: keras.ops.layer_normalization(
                x, *_in_place_of_none(weights, w), axis=axes, epsilon=layer.epsilon
            ),
            inputs,
            rows,
            weights,
            layer.compute_dtype,
        )
    if axes != [rows.dim]:
        return NotImplemented
    parts = _upcast(group, inputs, rows)
    moments = _joined_moments(group, group.compute(lambda x: _moments(x, rows.dim), parts), rows)

    def normalized(x: tf.Tensor, mean_and_variance: tf.Tensor, *own: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.unstack(mean_and_variance)
        gamma, beta = _in_place_of_none(weights, own)
        factor = tf.math.rsqrt(variance + layer.epsilon)
        factor = factor if gamma is None else factor * _shaped(gamma, x, rows.dim)
        offset = -mean * factor
        offset = offset if beta is None else offset + _shaped(beta, x, rows.dim)
        return tf.cast(x * factor + offset, layer.compute_dtype)

    own = _weights_in_parts(group, weights, rows)
    return group.joined(group.compute(normalized, parts, moments, *own), rows.dim)


@layer_rule(layers.RMSNormalization)
def rms_normalization(
    group: Group, layer: keras.Layer, original: Callable, x: tf.Tensor
) -> tf.Tensor:
    """`RMSNormalization.call`."""
    del original
    rows = group.known_rows(x) if is_plain_tensor(x) else None
    if rows is None:
        return NotImplemented
    axes, dtype = _axes(layer, x.shape.rank), x.dtype
    if rows.dim not in axes:
        return _each_its_own(
            group,
            lambda part, scale: keras.ops.rms_normalization(part, scale, axes, layer.epsilon),
            x,
            rows,
            [layer.scale],
            dtype,
        )
    if axes != [x.shape.rank - 1]:
        return NotImplemented
    parts = _upcast(group, x, rows)
    squares = group.compute(lambda p: tf.reduce_sum(tf.square(p), rows.dim, keepdims=True), parts)
    total = group.summed(squares)

    def normalized(part: tf.Tensor, squares: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        factor = tf.math.rsqrt(squares / sum(rows.sizes) + layer.epsilon)
        return tf.cast(part * factor * _shaped(scale, part, rows.dim), dtype)

    own = _weights_in_parts(group, [layer.scale], rows)
    return group.joined(group.compute(normalized, parts, total, *own), rows.dim)


@layer_rule(layers.BatchNormalization)
def batch_normalization(
    group: Group,
    layer: keras.Layer,
    original: Callable,
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """`BatchNormalization.call`; the moving averages stay whole."""
    del original
    rows = group.known_rows(inputs) if is_plain_tensor(inputs) else None
    if rows is None or getattr(layer, "renorm", False):  # of Keras 3.15
        return NotImplemented
    if rows.dim not in (0, *_axes(layer, inputs.shape.rank)) and mask is None:
        return _batch_normalization_of_rows(group, layer, inputs, rows, bool(training))
    if _axes(layer, inputs.shape.rank) != [rows.dim]:
        return NotImplemented
    parts = _upcast(group, inputs, rows)
    if training and layer.trainable:
        masks = [] if mask is None else [tf.convert_to_tensor(mask)]
        moments = group.compute(
            lambda x, *m: tf.stack(moments_of(layer, x, m[0] if m else None)), parts, *masks
        )
        _assign_averages(layer, group.joined(moments, 1))
    else:
        averages = [
            tf.cast(tf.convert_to_tensor(average), parts[0].dtype)
            for average in (layer.moving_mean, layer.moving_variance)
        ]
        moments = group.parts(tf.stack(averages), Rows(1, rows.sizes))
    weights = [layer.gamma, layer.beta]

    def normalized(x: tf.Tensor, mean_and_variance: tf.Tensor, *own: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.unstack(mean_and_variance)
        gamma, beta = _in_place_of_none(weights, [tf.cast(each, x.dtype) for each in own])
        y = keras.ops.batch_normalization(
            x, mean, variance, rows.dim, offset=beta, scale=gamma, epsilon=layer.epsilon
        )
        return tf.cast(y, layer.compute_dtype)

    own = _weights_in_parts(group, weights, rows)
    return group.joined(group.compute(normalized, parts, moments, *own), rows.dim)


def _batch_normalization_of_rows(
    group: Group, layer: keras.Layer, inputs: tf.Tensor, rows: Rows, training: bool
) -> tf.Tensor:
    """Of images in parts: each device has all features of its rows; moments of rows are joined."""
    parts = _upcast(group, inputs, rows)
    if training and layer.trainable:
        own = group.compute(lambda x: tf.stack(moments_of(layer, x, None)), parts)
        moments = _joined_moments_of_rows(group, own, rows)
        _assign_averages(layer, moments)
    else:
        averages = (layer.moving_mean, layer.moving_variance)
        moments = tf.stack([tf.cast(tf.convert_to_tensor(a), parts[0].dtype) for a in averages])
    weights = [layer.gamma, layer.beta]
    (axis,) = _axes(layer, inputs.shape.rank)

    def normalized(x: tf.Tensor, moments: tf.Tensor, *whole: tf.Tensor) -> tf.Tensor:
        gamma, beta = _in_place_of_none(weights, [tf.cast(each, x.dtype) for each in whole])
        mean, variance = tf.unstack(moments)
        y = keras.ops.batch_normalization(
            x, mean, variance, axis, offset=beta, scale=gamma, epsilon=layer.epsilon
        )
        return tf.cast(y, layer.compute_dtype)

    whole = [tf.convert_to_tensor(weight) for weight in weights if weight is not None]
    return group.joined(group.compute(normalized, parts, moments, *whole), rows.dim)


def _joined_moments_of_rows(group: Group, own: Sequence[tf.Tensor], rows: Rows) -> tf.Tensor:
    """Mean and variance, `[2, features]`, of all rows, from those of each device's own."""
    with tf.device(group.devices[0]):
        shares = [size / sum(rows.sizes) for size in rows.sizes]
        means, variances = zip(*(tf.unstack(each) for each in group.met(own)), strict=True)
        mean = sum_in_order([share * m for share, m in zip(shares, means, strict=True)])
        spreads = [
            share * (v + tf.math.squared_difference(m, mean))
            for share, m, v in zip(shares, means, variances, strict=True)
        ]
        return tf.stack([mean, sum_in_order(spreads)])


def _axes(layer: keras.Layer, rank: int) -> list[int]:
    """What a layer normalises along; a `BatchNormalization`, what it does not average over."""
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    return sorted(axis % rank if rank else axis for axis in axes)


def _upcast(group: Group, inputs: tf.Tensor, rows: Rows) -> list[tf.Tensor]:
    """The parts in float32 at least, as Keras normalises them."""
    dtype = tf.float64 if inputs.dtype == tf.float64 else tf.float32
    parts = group.parts(inputs, rows)
    return parts if inputs.dtype == dtype else group.compute(lambda x: tf.cast(x, dtype), parts)


def _moments(x: tf.Tensor, dim: int) -> tf.Tensor:
    """The mean along `dim`, of size 1 there, and the sum of squared deviations from it, as one."""
    mean = tf.reduce_mean(x, dim, keepdims=True)
    deviations = tf.math.squared_difference(x, tf.stop_gradient(mean))
    return tf.stack([mean, tf.reduce_sum(deviations, dim, keepdims=True)])


def _joined_moments(group: Group, own: Sequence[tf.Tensor], rows: Rows) -> tf.Tensor:
    """Mean and variance of all of which each device has its `_moments`."""
    total = sum(rows.sizes)
    with tf.device(group.devices[0]):
        means, squares = zip(*(tf.unstack(each) for each in group.met(own)), strict=True)
        mean = sum_in_order([n * m for n, m in zip(rows.sizes, means, strict=True)]) / total
        between = [
            n * tf.math.squared_difference(m, mean) for n, m in zip(rows.sizes, means, strict=True)
        ]
        return tf.stack([mean, sum_in_order([*squares, *between]) / total])


def _shaped(weight: tf.Tensor, x: tf.Tensor, dim: int) -> tf.Tensor:
    """A weight for each index along `dim` of `x`, which it multiplies."""
    return tf.reshape(
        tf.cast(weight, x.dtype), [-1 if i == dim else 1 for i in range(len(x.shape))]
    )


def _weights_in_parts(group: Group, weights: Sequence, rows: Rows) -> list[list[tf.Tensor]]:
    """Those that there are, along the features."""
    of_weight = Rows(0, rows.sizes)
    return [group.read_or_slice(weight, of_weight) for weight in weights if weight is not None]


def _in_place_of_none(weights: Sequence, tensors: Sequence[tf.Tensor]) -> list:
    """`tensors` for those of `weights` that there are, None for the others."""
    values = iter(tensors)
    return [None if weight is None else next(values) for weight in weights]


def _each_its_own(
    group: Group,
    function: Callable,
    inputs: tf.Tensor,
    rows: Rows,
    weights: Sequence,
    dtype: object,
) -> tf.Tensor:
    """What is normalised is whole on each device, and so are its weights."""
    whole = [tf.convert_to_tensor(weight) for weight in weights if weight is not None]
    parts = group.compute(
        lambda x, *w: tf.cast(function(x, *w), dtype), group.parts(inputs, rows), *whole
    )
    return group.joined(parts, rows.dim)


def _assign_averages(layer: keras.Layer, moments: tf.Tensor) -> None:
    """As Keras does; `moments` is `[2, features]`."""
    for average, value in zip(
        (layer.moving_mean, layer.moving_variance), tf.unstack(moments), strict=True
    ):
        before = tf.cast(average, value.dtype)
        average.assign(before * layer.momentum + value * (1.0 - layer.momentum))
