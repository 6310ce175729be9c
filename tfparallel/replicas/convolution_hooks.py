"""Convolutions that Keras has XLA compile get their kernel as a value.

TensorFlow's grouped convolution on a CPU is wrong without XLA, and so is that of channels first in
three dimensions. Keras puts them in a function that XLA compiles, which reads the kernel itself.
XLA refuses a variable on another device than its own, and a variable in parts would be put together
in there, without its gradient. The kernel is read before, where the step is traced.

Keras also makes a function of each call, with functions for its gradient, and each of them is sent
to all tasks of parameter servers. Within a step, calls that are alike share one: those of replicas,
and of layers. So do eager calls where that is asked for: XLA compiles each function anew.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.replicas.replica_step import current_replica_step

_are_shared: contextvars.ContextVar[bool] = contextvars.ContextVar("are_shared", default=False)
_CONVOLUTIONS = keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D


def hook_convolution(layer: object) -> None:
    """Has `layer` read its kernel before XLA, if it needs XLA. Twice changes nothing."""
    if isinstance(layer, _CONVOLUTIONS) and (layer.groups > 1 or _is_broken_on_cpus(layer)):
        of_1d = type(layer).call is keras.layers.Conv1D.call  # it asks for no `convolution_op`
        name = "call" if of_1d else "convolution_op"
        by_value = functools.partial(_call_of_1d if of_1d else _of_value, layer)
        hook_once(
            layer,
            name,
            wrapped(layer, name, by_value),
            why="XLA reads no kernel on another device, or in parts: it gets the value.",
        )


@contextlib.contextmanager
def convolutions_shared() -> Iterator[None]:
    """Within it, calls outside of a step share functions, too, which are kept."""
    token = _are_shared.set(True)
    try:
        yield
    finally:
        _are_shared.reset(token)


def convolved(layer: keras.Layer, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """What Keras's convolutions compute before they add a bias, with another kernel than theirs."""
    padding = layer.padding
    if padding == "causal":
        before = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
        steps = 1 if layer.data_format == "channels_last" else 2
        x = keras.ops.pad(x, [[before, 0] if dim == steps else [0, 0] for dim in range(3)])
        padding = "valid"
    return keras.ops.conv(
        x, kernel, list(layer.strides), padding, layer.data_format, layer.dilation_rate
    )


def _is_broken_on_cpus(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Conv3D) and layer.data_format == "channels_first"


def _of_value(
    layer: keras.Layer, convolution_op: Callable, inputs: tf.Tensor, kernel: object
) -> tf.Tensor:
    """`layer.convolution_op`."""
    value: tf.Tensor = _value(kernel)
    is_of_keras = type(layer).convolution_op is keras.layers.Conv2D.convolution_op
    is_in_step = current_replica_step() is not None and tf.is_symbolic_tensor(inputs)
    if not is_of_keras or not (is_in_step or _are_shared.get()):
        return convolution_op(inputs, value)
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in (inputs, value)]
    strides, dilation_rate = tuple(layer.strides), tuple(layer.dilation_rate)
    shared = _shared(*specs, strides, layer.padding, layer.data_format, dilation_rate)
    return shared(inputs, value)


@functools.cache
def _shared(
    x: tf.TensorSpec,
    kernel: tf.TensorSpec,
    strides: tuple[int, ...],
    padding: str,
    data_format: str,
    dilation_rate: tuple[int, ...],
) -> Callable:
    """Keras's convolution of such tensors, on any device."""

    def convolution(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return keras.ops.conv(x, kernel, list(strides), padding, data_format, dilation_rate)

    with tf.init_scope(), tf.device(None):
        return tf.function(convolution, autograph=False).get_concrete_function(x, kernel)


def _call_of_1d(layer: keras.Layer, call: Callable, inputs: tf.Tensor) -> tf.Tensor:
    """`Conv1D.call`."""
    del call
    y = convolved(layer, inputs, _value(layer.kernel))
    if layer.use_bias:
        is_last = layer.data_format == "channels_last"
        y = keras.ops.add(y, keras.ops.reshape(layer.bias, (1, 1, -1) if is_last else (1, -1, 1)))
    return y if layer.activation is None else layer.activation(y)


def _value(kernel: object) -> object:
    is_variable = isinstance(kernel, keras.Variable)  # not a symbolic tensor, nor LoRA's sum
    return tf.convert_to_tensor(kernel) if is_variable else kernel
