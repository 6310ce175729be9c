"""Integers that Keras computes with, kept on the devices.

Of int32 TensorFlow has most operations on GPUs in the host's memory only: they are meant for
shapes. Keras uses them for numbers as well, which then go to the host in the midst of a step, and
the host waits for the GPU to send them:

    argmax     every accuracy: looks for -0.0 by comparing as many sign bits as there are scores
    not_equal  every mask of an Embedding: compares tokens
    take       every Embedding: adds the table's length to numbers of rows that are negative
    seeds      every Dropout: TensorFlow makes keys and counters of them on the host

The same is computed with bits that become bool, with int64, which GPUs have, and by the generator
itself. Keras and TensorFlow look their functions up in their modules, and have no object to hook:
so they are replaced there, while a step runs that has a GPU, and never otherwise.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# Where `argmax` finds `signbit`, and `keras.ops` finds `take`.
from keras.src.backend.tensorflow import numpy as keras_numpy

# Where what draws finds `get_key_counter_alg`.
from tensorflow.python.ops import control_flow_util, random_ops_util

from tfparallel.internals.hooks import shadowed, wrapped

PHILOX: int = tf.random.Algorithm.PHILOX.value  # what "auto_select" takes on CPUs and GPUs
_SCRAMBLING_KEY = 0x02461E293EC8F720  # of `stateless_random_ops.cc`


@contextlib.contextmanager
def integers_stay(devices: Sequence[str]) -> Iterator[None]:
    """Within it, what is computed with integers sends none from a GPU to the host.

    Args:
        devices: that compute.
    """
    if not has_gpu(devices):
        yield
        return
    functions: list[tuple[Any, str, Callable]] = [
        (keras_numpy, "signbit", _sign_bits),
        (keras_numpy, "not_equal", _not_equal),
        (keras_numpy, "take", _take),
        (random_ops_util, "get_key_counter_alg", _key_counter_alg),
    ]
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


def key_and_counter(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Of the generator that `tf.random.stateless_uniform` draws from, for a seed `[2]`."""
    key, counter, _ = random_ops_util.get_key_counter_alg(seed, None)
    return key, counter


def has_gpu(devices: Sequence[str]) -> bool:
    """Whether one of `devices` is a GPU."""
    return any(tf.DeviceSpec.from_string(device).device_type == "GPU" for device in devices)


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


def _key_counter_alg(original: Callable, seed: tf.Tensor, alg: object) -> tuple:
    """The generator's key, counter and algorithm for a seed `[2]`, made where that is.

    Philox scrambles a seed by its own first four numbers. XLA has generators of its own.
    """
    is_known = not tf.is_symbolic_tensor(seed) or seed.op.type == "Const"
    is_chosen = alg not in (None, "auto_select")
    graph = tf.compat.v1.get_default_graph()
    if is_known or is_chosen or control_flow_util.GraphOrParentsInXlaContext(graph):
        return original(seed, alg)
    mixed = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[4],
        key=tf.constant([_SCRAMBLING_KEY], tf.uint64),
        counter=tf.cast(seed, tf.uint64),
        alg=PHILOX,
        dtype=tf.uint32,
    )
    pair = tf.bitcast(tf.reshape(mixed, [2, 2]), tf.uint64)
    return pair[:1], tf.concat([tf.zeros([1], tf.uint64), pair[1:]], 0), PHILOX
