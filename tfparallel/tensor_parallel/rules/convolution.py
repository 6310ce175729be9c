"""Convolutions by filters (columns) or input channels (rows), transposed and separable ones too.

A depthwise convolution computes each channel for itself: it is in parts as its input is. A
separable one is that, then one of a single point, by filters or channels.
"""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import layers

from tfparallel.replicas.convolution_hooks import convolved
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import is_plain_tensor, layer_rule
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.rules.linear import (
    Linear,
    compute_linear,
    compute_whole,
    is_elementwise_function,
    is_variable,
)
from tfparallel.tensor_parallel.rules.spatial import by_rows, spatial_dims


@layer_rule(layers.Conv1D)
@layer_rule(layers.Conv2D)
@layer_rule(layers.Conv3D)
def convolution(group: Group, layer: keras.Layer, original: Callable, inputs: object) -> tf.Tensor:
    """`BaseConv.call`; kernel `[*window, input channels, filters]`."""
    del original
    dim = _image_dim(group, layer, inputs)
    if dim is not None and layer.groups == 1:
        result = _by_image_rows(group, layer, inputs, dim, _convolve_valid, [layer.kernel])
        if result is not NotImplemented:
            return result
    if _rows(group, layer.kernel, inputs) is None:
        return NotImplemented
    linear = _between_channels(
        group,
        layer,
        layer.kernel,
        lambda x, w: convolved(layer, x, w),
        filters=layer.rank + 1,
        channels=layer.rank,
    )
    return _computed(group, inputs, linear, layer.groups == 1)


@layer_rule(layers.Conv1DTranspose)
@layer_rule(layers.Conv2DTranspose)
@layer_rule(layers.Conv3DTranspose)
def transposed_convolution(
    group: Group, layer: keras.Layer, original: Callable, inputs: object
) -> tf.Tensor:
    """`BaseConvTranspose.call`; kernel `[*window, filters, input channels]`."""
    del original
    if _rows(group, layer.kernel, inputs) is None:
        return NotImplemented
    linear = _between_channels(
        group,
        layer,
        layer.kernel,
        lambda x, w: keras.ops.conv_transpose(
            x,
            w,
            list(layer.strides),
            layer.padding,
            layer.output_padding,
            layer.data_format,
            layer.dilation_rate,
        ),
        filters=layer.rank,
        channels=layer.rank + 1,
    )
    return _computed(group, inputs, linear)


@layer_rule(layers.DepthwiseConv1D)
@layer_rule(layers.DepthwiseConv2D)
def depthwise_convolution(
    group: Group, layer: keras.Layer, original: Callable, inputs: object
) -> tf.Tensor:
    """`BaseDepthwiseConv.call`; kernel `[*window, channels, filters of a channel]`."""
    del original
    dim = _image_dim(group, layer, inputs)
    if dim is not None:
        result = _by_image_rows(group, layer, inputs, dim, _depthwise_valid, [layer.kernel])
        if result is not NotImplemented:
            return result
    if _rows(group, layer.kernel, inputs) is None:
        return NotImplemented
    bias = layer.bias if layer.use_bias else None
    linear = _by_channels(layer, layer.kernel, bias, layer.activation)
    return _computed(group, inputs, linear, group.rows(layer.kernel).dim == layer.rank)  # type: ignore[union-attr]


@layer_rule(layers.SeparableConv1D)
@layer_rule(layers.SeparableConv2D)
def separable_convolution(
    group: Group, layer: keras.Layer, original: Callable, inputs: tf.Tensor
) -> tf.Tensor:
    """`BaseSeparableConv.call`: depthwise, then of a single point."""
    del original
    depthwise, pointwise = layer.depthwise_kernel, layer.pointwise_kernel
    dim = _image_dim(group, layer, inputs)
    if dim is not None:
        kernels = [depthwise, pointwise]
        result = _by_image_rows(group, layer, inputs, dim, _separable_valid, kernels)
        if result is not NotImplemented:
            return result
    own = _rows(group, depthwise, inputs)
    if own is None and _rows(group, pointwise, inputs) is None:
        return NotImplemented
    by_channels = _by_channels(layer, depthwise, None, None)
    hidden = _computed(group, inputs, by_channels, own is not None and own.dim == layer.rank)
    linear = _between_channels(
        group,
        layer,
        pointwise,
        lambda x, w: keras.ops.conv(x, w, 1, "valid", layer.data_format),
        filters=layer.rank + 1,
        channels=layer.rank,
    )
    return _computed(group, hidden, linear)


def _rows(group: Group, kernel: keras.Variable, inputs: object) -> Rows | None:
    return group.rows(kernel) if is_variable(kernel) and is_plain_tensor(inputs) else None


def _image_dim(group: Group, layer: keras.Layer, inputs: object) -> int | None:
    """The dim of the image along which the layout asks for the output in parts; None for none."""
    dim = group.dim_of_output(layer, layer.rank + 2)
    is_of_image = is_plain_tensor(inputs) and dim in spatial_dims(layer, layer.rank + 2)
    return dim if is_of_image else None


def _by_image_rows(
    group: Group, layer: keras.Layer, inputs: tf.Tensor, dim: int, convolve: Callable, kernels: list
) -> object:
    """The output, each device its rows; `NotImplemented` where that cannot be."""
    if not all(map(is_variable, kernels)):
        return NotImplemented
    own = is_elementwise_function(layer.activation)
    weights = [tf.convert_to_tensor(kernel) for kernel in kernels]
    if layer.use_bias:
        weights.append(tf.convert_to_tensor(layer.bias))

    def output(x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        y = convolve(layer, x, *weights[: len(kernels)])
        if layer.use_bias:
            y = keras.ops.add(y, _by_channel(layer, weights[-1]))
        return layer.activation(y) if own and layer.activation is not None else y

    whole = by_rows(group, layer, inputs, dim, output, weights)
    return whole if own or whole is NotImplemented else layer.activation(whole)


def _convolve_valid(layer: keras.Layer, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    return keras.ops.conv(
        x, kernel, list(layer.strides), "valid", layer.data_format, layer.dilation_rate
    )


def _depthwise_valid(layer: keras.Layer, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    return keras.ops.depthwise_conv(
        x, kernel, layer.strides, "valid", layer.data_format, layer.dilation_rate
    )


def _separable_valid(
    layer: keras.Layer, x: tf.Tensor, depthwise: object, pointwise: object
) -> tf.Tensor:
    hidden = _depthwise_valid(layer, x, depthwise)
    return keras.ops.conv(hidden, pointwise, 1, "valid", layer.data_format)


def _computed(
    group: Group, inputs: tf.Tensor, linear: Linear, is_possible: bool = True
) -> tf.Tensor:
    """In parts where the kernel's dim that is in parts allows it, else from the whole."""
    in_parts = linear.input_dim is not None or linear.output_dim is not None
    return (compute_linear if in_parts and is_possible else _compute_whole)(group, inputs, linear)


def _compute_whole(group: Group, inputs: tf.Tensor, linear: Linear) -> tf.Tensor:
    del group
    return compute_whole(inputs, linear)


def _between_channels(
    group: Group,
    layer: keras.Layer,
    kernel: keras.Variable,
    compute: Callable,
    filters: int,
    channels: int,
) -> Linear:
    """A convolution whose kernel has a dim of filters and one of input channels."""
    rows, dim = group.rows(kernel), _channels_of(layer)
    is_column = rows is not None and rows.dim == filters
    is_row = rows is not None and rows.dim == channels
    return Linear(
        compute,
        kernel,
        layer.bias if layer.use_bias else None,
        layer.activation,
        input_dim=dim if is_row else None,
        output_dim=dim if is_column else None,
        bias_dim=0 if is_column else None,
        shaped=lambda bias: _by_channel(layer, bias),
    )


def _by_channels(layer: keras.Layer, kernel: object, bias: object, activation: object) -> Linear:
    """A depthwise convolution."""
    dim = _channels_of(layer)
    return Linear(
        lambda x, w: keras.ops.depthwise_conv(
            x, w, layer.strides, layer.padding, layer.data_format, layer.dilation_rate
        ),
        kernel,
        bias,
        activation,
        input_dim=dim,
        output_dim=dim,
        bias_dim=0,
        shaped=lambda bias: _by_channel(layer, bias),
        outputs_of_index=layer.depth_multiplier,
    )


def _channels_of(layer: keras.Layer) -> int:
    """The dim of channels of inputs and outputs."""
    return layer.rank + 1 if layer.data_format == "channels_last" else 1


def _by_channel(layer: keras.Layer, bias: tf.Tensor) -> tf.Tensor:
    return (
        bias if layer.data_format == "channels_last" else tf.reshape(bias, [-1] + [1] * layer.rank)
    )
