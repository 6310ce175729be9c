"""What Keras computes with integers is the same, and stays on a GPU (see tests/gpu for that)."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import numpy as keras_numpy

from tfparallel.internals.keras_integers import integers_stay

NUMBERS = [0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, -np.nan, -1e-300, 1e-300]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "bool"])
def test_signs_are_those_of_keras(dtype):
    numbers = tf.cast(tf.constant(np.nan_to_num(NUMBERS) if dtype[0] in "ib" else NUMBERS), dtype)
    expected = keras.ops.signbit(numbers)
    with integers_stay(["GPU:0"], seeds_on_host=False):
        received = keras.ops.signbit(numbers)
    np.testing.assert_array_equal(received, expected)
    assert received.dtype == expected.dtype


def test_zeros_are_ordered_by_sign_as_keras_does():
    scores = tf.constant([[-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0]])
    with integers_stay(["GPU:0"], seeds_on_host=False):
        np.testing.assert_array_equal(keras.ops.argmax(scores, -1), [1, 0, 0])


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_rows_of_a_table_are_those_of_keras(axis):
    table = tf.reshape(tf.range(12.0), [4, 3])
    indices = tf.constant([[2, -1], [0, 1]])
    expected = keras.ops.take(table, indices, axis)
    with integers_stay(["GPU:0"], seeds_on_host=False):
        np.testing.assert_array_equal(keras.ops.take(table, indices, axis), expected)


@pytest.mark.parametrize("other", [0, 2, [2, 0], [1.5, 2.0]])
def test_masks_of_tokens_are_those_of_keras(other):
    tokens = tf.constant([[2, 0], [0, 1]])
    expected = keras.ops.not_equal(tokens, other)
    with integers_stay(["GPU:0"], seeds_on_host=False):
        received = keras.ops.not_equal(tokens, other)
    np.testing.assert_array_equal(received, expected)


def test_indices_of_a_sparse_gradient_are_int64():
    """Those of int32 would be reshaped on the host, in the backward pass."""
    table = tf.Variable(tf.ones([4, 3]))
    with tf.GradientTape() as tape, integers_stay(["GPU:0"], seeds_on_host=False):
        taken = keras.ops.take(table, tf.constant([1, 1, 3]), 0)
    gradient = tape.gradient(taken, table)
    assert gradient.indices.dtype == tf.int64
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient)[:, 0], [0, 2, 0, 1])


def test_nothing_of_keras_is_replaced_where_there_is_no_gpu():
    signbit, take = keras_numpy.signbit, keras_numpy.take
    with integers_stay(["/job:worker/task:0/device:CPU:0", "CPU:1"], seeds_on_host=True):
        assert (keras_numpy.signbit, keras_numpy.take) == (signbit, take)
    with integers_stay(["CPU:0", "/device:GPU:1"], seeds_on_host=True):
        assert keras_numpy.signbit is not signbit
        assert keras_numpy.signbit.__name__ == "signbit"  # as who asks for it expects
        assert inspect.signature(keras_numpy.take) == inspect.signature(take)
    assert (keras_numpy.signbit, keras_numpy.take) == (signbit, take)
