"""Integers that Keras computes with, kept on the devices.

Of int32 TensorFlow has most operations on GPUs in the host's memory only: they are meant for
shapes. Keras uses them for numbers as well, which then go to the host in the midst of a step, and
the host waits for the GPU to send them:

    argmax     every accuracy: looks for -0.0 by comparing as many sign bits as there are scores
    not_equal  every mask of an Embedding: compares tokens
    take       every Embedding: adds the table's length to numbers of rows that are negative
    seeds      every Dropout: TensorFlow wants them as int32 on the host

The same is computed with bits that become bool, and with int64, which GPUs have. Seeds that are on
the host are cast there. Keras looks its functions up in its modules, and has no object to hook: so
they are replaced there, while a step runs that has a GPU, and never otherwise.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# Where `argmax` finds `signbit`, and `keras.ops` finds `take`.
from keras.src.backend.tensorflow import numpy as keras_numpy

# Where what draws finds `_cast_seed`.
from keras.src.backend.tensorflow import random as keras_random

from tfparallel.internals.hooks import shadowed, wrapped


@contextlib.contextmanager
def integers_stay(devices: Sequence[str], seeds_on_host: bool) -> Iterator[None]:
    """Within it, what Keras computes with integers sends none from a GPU to the host.

    Args:
        devices: that compute.
        seeds_on_host: whether seed generators have their state there, from where nothing goes to a
            device then but what is drawn with.
    """
    if not has_gpu(devices):
        yield
        return
    functions: list[tuple[Any, str, Callable]] = [
        (keras_numpy, "signbit", _sign_bits),
        (keras_numpy, "not_equal", _not_equal),
        (keras_numpy, "take", _take),
    ]
    if seeds_on_host:
        functions.append((keras_random, "_cast_seed", _cast_in_place))
    with contextlib.ExitStack() as hooks:
        for module, name, function in functions:
            hooks.enter_context(
                shadowed(
                    module,
                    name,
                    wrapped(module, name, function),
                    during="a step",
                    why="GPUs keep integers.",
                )
            )
        yield


def has_gpu(devices: Sequence[str]) -> bool:
    """Whether one of `devices` is a GPU."""
    return any(tf.DeviceSpec.from_string(device).device_type == "GPU" for device in devices)


def _cast_in_place(original: Callable, seed: object) -> tf.Tensor:
    device = getattr(seed, "device", "")
    with tf.device(device) if device else contextlib.nullcontext():
        return original(seed)


def _sign_bits(original: Callable, x: object) -> tf.Tensor:
    if not isinstance(x, tf.Tensor) or not x.dtype.is_floating:
        return original(x)
    bits = tf.bitcast(tf.cast(x, tf.float32), tf.int32)
    return tf.cast(tf.bitwise.bitwise_and(bits, tf.constant(tf.int32.min)), tf.bool)


def _not_equal(original: Callable, x1: object, x2: object) -> tf.Tensor:
    if isinstance(x1, tf.Tensor) and x1.dtype == tf.int32 and x1.shape.rank != 0:
        x1 = tf.cast(x1, tf.int64)
    return original(x1, x2)


def _take(original: Callable, x: object, indices: object, axis: int | None = None) -> tf.Tensor:
    if isinstance(indices, tf.Tensor) and indices.dtype == tf.int32:
        indices = tf.cast(indices, tf.int64)
    return original(x, indices, axis=axis)
