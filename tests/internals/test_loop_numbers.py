"""The gradient of a loop takes no numbers from a GPU, and is the same to the bit."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.gpu.audit import audit
from tfparallel.internals import keras_integers
from tfparallel.internals.loop_numbers import loops_keep_numbers_on_hosts
from tfparallel.internals.numbers_in_shapes import from_shape, in_shape

DEVICE = "CPU:1"
X = np.random.default_rng(1).normal(size=(3, 4, 2)).astype(np.float32)


def turns(x):
    """A loop that counts down, below 0, over rows of an unknown number, sums and products."""
    weights = tf.ones([tf.shape(x)[0], 2])

    def turn(i, rows):
        row = tf.gather(x, i + 2, axis=1)
        return i - 1, tf.tanh(rows * row + row + weights * tf.cast(i, rows.dtype))

    begin = tf.constant(1), weights * 0.5
    return tf.while_loop(lambda i, _: i > -3, turn, begin, maximum_iterations=9)[1]


def recurrent(x):
    return _layers()(x)


@functools.cache
def _layers():
    with tf.init_scope():
        layers = [keras.layers.Masking(), keras.layers.LSTM(3), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((None, 2)), *layers])


def gradients(computation, has_gpu, **options):
    """A step that differentiates the computation on a device."""

    @tf.function(autograph=False, **options)
    def step(x):
        has = mock.patch.object(keras_integers, "has_gpu", return_value=has_gpu)
        with has, loops_keep_numbers_on_hosts([DEVICE]), tf.device(DEVICE):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(computation(x) ** 2.0, -1)
            return tape.gradient(loss, x)

    return step


def traced(computation, has_gpu):
    return gradients(computation, has_gpu).get_concrete_function(tf.TensorSpec([None, 4, 2]))


@pytest.mark.parametrize("computation", [turns, recurrent])
def test_no_turn_of_a_gradient_sends_the_host_numbers(computation):
    plain, ours = (traced(computation, has_gpu) for has_gpu in (False, True))
    sent = [audit(each.graph).copies["to_host"] for each in (plain, ours)]
    assert [any("PopBack" in edge for edge in edges) for edges in sent] == [True, False]
    tf.debugging.assert_equal(ours(X), plain(X))


def test_gradients_of_gradients_are_the_same():
    def twice(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(turns(x) ** 2.0)
        return tape.gradient(loss, x)

    tf.debugging.assert_equal(traced(twice, True)(X), traced(twice, False)(X))


def test_what_xla_compiles_is_as_ever():
    plain, ours = (gradients(turns, has_gpu, jit_compile=True) for has_gpu in (False, True))
    tf.debugging.assert_equal(ours(X), plain(X))


@pytest.mark.parametrize("numbers", [7, -7, [3, 0, -1], []])
def test_a_shape_says_what_numbers_are(numbers):
    numbers = tf.constant(numbers, tf.int32)
    carrier = in_shape(numbers)
    assert not tf.size(carrier)
    tf.debugging.assert_equal(from_shape(carrier, numbers.shape), numbers)
