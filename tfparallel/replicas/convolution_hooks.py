"""Convolutions that Keras has XLA compile get their kernel as a value.

TensorFlow's grouped convolution on a CPU is wrong without XLA, and so is that of channels first in
three dimensions. Keras puts them in a function that XLA compiles, which reads the kernel itself.
XLA refuses a variable on another device than its own, and a variable in parts would be put together
in there, without its gradient. The kernel is read before, where the step is traced.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.internals.hooks import hook_once, wrapped

_CONVOLUTIONS = keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D


def hook_convolution(layer: object) -> None:
    """Has `layer` read its kernel before XLA, if it needs XLA. Twice changes nothing."""
    if isinstance(layer, _CONVOLUTIONS) and (layer.groups > 1 or _is_broken_on_cpus(layer)):
        hook_once(
            layer,
            "convolution_op",
            wrapped(layer, "convolution_op", _of_value),
            why="XLA reads no kernel on another device, or in parts: it gets the value.",
        )


def _is_broken_on_cpus(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Conv3D) and layer.data_format == "channels_first"


def _of_value(convolution_op: Callable, inputs: tf.Tensor, kernel: object) -> tf.Tensor:
    is_variable = isinstance(kernel, keras.Variable)  # not a symbolic tensor, nor LoRA's sum
    return convolution_op(inputs, tf.convert_to_tensor(kernel) if is_variable else kernel)
