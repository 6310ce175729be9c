"""Convolutions and pooling of one image by several devices: each computes its rows of the output.

A layout of a layer's output along an image's rows or columns asks for it,

    layout["conv.*/output"] = (None, "model", None, None)

and pooling goes on so with what it gets in such parts. Kernels are whole, and each device gets a
copy. What a window sees beyond a device's own rows, its halo, comes from the neighbours.
"""

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import record
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.halos import regions
from tfparallel.tensor_parallel.known_parts import on_device
from tfparallel.tensor_parallel.rows import even_rows
from tfparallel.tensor_parallel.windows import Span, Window, spans


def spatial_dims(layer: keras.Layer, rank: int) -> range:
    """The dims of images among those of a tensor of `rank` dims."""
    first = 2 if layer.data_format == "channels_first" else 1
    return range(first, first + rank - 2)


def by_rows(
    group: Group,
    layer: keras.Layer,
    inputs: tf.Tensor,
    dim: int,
    compute: Callable,
    weights: Sequence,
    fill: float = 0.0,
) -> tf.Tensor:
    """What a layer gives for an image, each device its part along `dim`.

    Args:
        group: of devices.
        layer: a convolution or a pooling, or what has windows, strides and padding as these.
        inputs: image.
        dim: of input and output.
        compute: of a padded image, which it does not pad again, and the weights.
        weights: tensors, whole.
        fill: what padding is.

    Returns:
        The output, or `NotImplemented` where sizes are unknown, or too small for all devices.
    """
    dims = spatial_dims(layer, len(inputs.shape))
    windows = dict(zip(dims, _windows(layer), strict=True))
    sizes = [inputs.shape[d] for d in dims]
    count = len(group.devices)
    if None in sizes or min(windows[dim].outputs(inputs.shape[dim]), inputs.shape[dim]) < count:
        return NotImplemented
    rows = group.known_rows(inputs)
    if rows is None or rows.dim != dim:
        rows = even_rows(dim, inputs.shape[dim], count)
    needed = spans(windows[dim], inputs.shape[dim], count)
    parts = group.parts(inputs, rows)
    own = regions(parts, rows, [(span.start, span.end) for span in needed], group.devices)
    whole = {
        d: w.span(s, 0, w.outputs(s) - 1) for (d, w), s in zip(windows.items(), sizes, strict=True)
    }
    outputs = []
    for device, x, span in zip(group.devices, own, needed, strict=True):
        paddings = _paddings({**whole, dim: span}, len(inputs.shape))
        function = functools.partial(_output, compute, paddings, fill)
        outputs.append(on_device(device, function, x, *weights))
    return group.joined(outputs, dim)


def _output(
    compute: Callable, paddings: list, fill: float, x: tf.Tensor, *weights: tf.Tensor
) -> tf.Tensor:
    padded = (
        tf.pad(x, paddings, constant_values=tf.cast(fill, x.dtype))
        if any(map(any, paddings))
        else x
    )
    return compute(padded, *weights)


def _windows(layer: keras.Layer) -> list[Window]:
    """Along each dim of an image."""
    sizes = getattr(layer, "pool_size", None) or layer.kernel_size
    dilations = getattr(layer, "dilation_rate", (1,) * len(sizes))
    return [
        Window((size - 1) * dilation + 1, stride, layer.padding)
        for size, dilation, stride in zip(sizes, dilations, layer.strides, strict=True)
    ]


def _paddings(around: dict[int, Span], rank: int) -> list[list[int]]:
    """As `tf.pad` takes them."""
    return [[around[d].before, around[d].after] if d in around else [0, 0] for d in range(rank)]


def max_pooling(group: Group, layer: keras.Layer, inputs: tf.Tensor, dim: int) -> object:
    """`MaxPooling.call` of an image in parts along `dim`."""

    def pool(x: tf.Tensor) -> tf.Tensor:
        return keras.ops.max_pool(x, layer.pool_size, layer.strides, "valid", layer.data_format)

    return by_rows(group, layer, inputs, dim, pool, [], fill=inputs.dtype.min)


def average_pooling(group: Group, layer: keras.Layer, inputs: tf.Tensor, dim: int) -> tf.Tensor:
    """`AveragePooling.call` of an image in parts along `dim`; padding does not count."""

    def pool(x: tf.Tensor) -> tf.Tensor:
        return keras.ops.average_pool(x, layer.pool_size, layer.strides, "valid", layer.data_format)

    means = by_rows(group, layer, inputs, dim, pool, [])
    if means is NotImplemented or layer.padding == "valid":
        return means
    with record.stop_recording():
        shares = by_rows(group, layer, tf.ones_like(inputs), dim, pool, [])
    rows = even_rows(dim, means.shape[dim], len(group.devices))
    quotients = group.compute(tf.divide, group.parts(means, rows), group.parts(shares, rows))
    return group.joined(quotients, dim)
