"""Signs of numbers, which Keras's `argmax` looks at, without a comparison on the host.

`argmax` takes -0.0 for less than 0.0. Keras compares the sign bit, an int32, with 0; of int32
TensorFlow has `Less` on GPUs in the host's memory only. So each accuracy of a step would copy as
many numbers as there are scores to the host, and wait for the forward pass to do so.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# Where `argmax` finds `signbit`.
from keras.src.backend.tensorflow import numpy as keras_numpy

from tfparallel.internals.hooks import shadowed


@contextlib.contextmanager
def signs_on_devices() -> Iterator[None]:
    """Within it, the sign bits of numbers of floating point are found where these are."""
    with shadowed(
        keras_numpy,
        "signbit",
        functools.partial(_sign_bits, keras_numpy.signbit),
        during="a Keras step",
        why="Keras compares signs as int32, which TensorFlow has in the host's memory only.",
    ):
        yield


def _sign_bits(original: Callable, x: Any) -> Any:
    if not isinstance(x, tf.Tensor) or not x.dtype.is_floating:
        return original(x)
    bits = tf.bitcast(tf.cast(x, tf.float32), tf.int32)
    return tf.cast(tf.bitwise.bitwise_and(bits, tf.constant(tf.int32.min)), tf.bool)
