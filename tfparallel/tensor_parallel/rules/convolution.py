"""`Conv1D`, `Conv2D` and `Conv3D` by filters (columns) or input channels (rows)."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import is_plain_tensor, layer_rule
from tfparallel.tensor_parallel.rules.linear import (
    Linear,
    compute_linear,
    compute_whole,
    is_variable,
)


@layer_rule(keras.layers.Conv1D)
@layer_rule(keras.layers.Conv2D)
@layer_rule(keras.layers.Conv3D)
def convolution(group: Group, layer: Any, original: Callable, inputs: Any) -> tf.Tensor:
    """`BaseConv.call`; kernel `[*window, input channels, filters]`."""
    del original
    kernel = layer.kernel
    rows = group.rows(kernel) if is_variable(kernel) and is_plain_tensor(inputs) else None
    if rows is None:
        return NotImplemented
    channels = layer.rank + 1 if layer.data_format == "channels_last" else 1
    is_column = rows.dim == layer.rank + 1
    linear = Linear(
        lambda x, w: _convolve(layer, x, w),
        kernel,
        layer.bias if layer.use_bias else None,
        layer.activation,
        input_dim=None if is_column else channels,
        output_dim=channels if is_column else None,
        bias_dim=0 if is_column else None,
        shaped=lambda bias: _by_channel(layer, bias),
    )
    if rows.dim < layer.rank or layer.groups != 1:
        return compute_whole(inputs, linear)
    return compute_linear(group, inputs, linear)


def _convolve(layer: Any, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    if layer.padding != "causal":
        return layer.convolution_op(x, kernel)
    before = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
    steps = 1 if layer.data_format == "channels_last" else 2
    padding = [[before, 0] if dim == steps else [0, 0] for dim in range(3)]
    return keras.ops.conv(
        tf.pad(x, padding),
        kernel,
        strides=list(layer.strides),
        padding="valid",
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def _by_channel(layer: Any, bias: tf.Tensor) -> tf.Tensor:
    return (
        bias if layer.data_format == "channels_last" else tf.reshape(bias, [-1] + [1] * layer.rank)
    )
