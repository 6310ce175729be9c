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
    with integers_stay(["GPU:0"]):
        received = keras.ops.signbit(numbers)
    np.testing.assert_array_equal(received, expected)
    assert received.dtype == expected.dtype


def test_zeros_are_ordered_by_sign_as_keras_does():
    scores = tf.constant([[-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0]])
    with integers_stay(["GPU:0"]):
        np.testing.assert_array_equal(keras.ops.argmax(scores, -1), [1, 0, 0])


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_rows_of_a_table_are_those_of_keras(axis):
    table = tf.reshape(tf.range(12.0), [4, 3])
    indices = tf.constant([[2, -1], [0, 1]])
    expected = keras.ops.take(table, indices, axis)
    with integers_stay(["GPU:0"]):
        np.testing.assert_array_equal(keras.ops.take(table, indices, axis), expected)


@pytest.mark.parametrize("other", [0, 2, [2, 0], [1.5, 2.0]])
def test_masks_of_tokens_are_those_of_keras(other):
    tokens = tf.constant([[2, 0], [0, 1]])
    expected = keras.ops.not_equal(tokens, other)
    with integers_stay(["GPU:0"]):
        received = keras.ops.not_equal(tokens, other)
    np.testing.assert_array_equal(received, expected)


def test_indices_of_a_sparse_gradient_are_int64():
    """Those of int32 would be reshaped on the host, in the backward pass."""
    table = tf.Variable(tf.ones([4, 3]))
    with tf.GradientTape() as tape, integers_stay(["GPU:0"]):
        taken = keras.ops.take(table, tf.constant([1, 1, 3]), 0)
    gradient = tape.gradient(taken, table)
    assert gradient.indices.dtype == tf.int64
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient)[:, 0], [0, 2, 0, 1])


DRAWS = {
    "uniform": lambda seed: keras.random.uniform([7, 5], seed=seed),
    "normal": lambda seed: keras.random.normal([7, 5], dtype="float64", seed=seed),
    "truncated": lambda seed: keras.random.truncated_normal([7, 5], seed=seed),
    "integers": lambda seed: keras.random.randint([9], 0, 100, seed=seed),
    "gamma": lambda seed: keras.random.gamma([9], 2.0, seed=seed),
    "beta": lambda seed: keras.random.beta([9], 2.0, 3.0, seed=seed),
    "dropout": lambda seed: keras.random.dropout(tf.ones([4, 9]), 0.4, seed=seed),
    "binomial": lambda seed: keras.random.binomial([9], 5.0, 0.4, seed=seed),
    "categorical": lambda seed: keras.random.categorical(tf.zeros([2, 9]), 5, seed=seed),
    "shuffle": lambda seed: keras.random.shuffle(tf.range(9), seed=seed),
}


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 2, 2**31 - 1, 2**40 + 3, -5])
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_is_what_keras_draws(draw, seed):
    """Of a seed that is computed, as a generator's is; twice, as its counter goes on."""

    def drawn(devices):
        generator = keras.random.SeedGenerator(seed)
        with integers_stay(devices):
            function = tf.function(lambda: DRAWS[draw](generator), autograph=False)
            function.get_concrete_function()
        return [function().numpy() for _ in range(2)]

    np.testing.assert_array_equal(drawn(["GPU:0"]), drawn(["CPU:0"]))


@pytest.mark.parametrize("seed", [[3, -4], [2**40, -(2**41)]])
def test_draws_of_tensorflow_are_the_same_for_any_seed(seed):
    seed = tf.constant(seed, tf.int64 if max(seed) > 2**31 else tf.int32)
    expected = tf.random.stateless_normal([9], seed)
    with integers_stay(["GPU:0"]):
        function = tf.function(lambda own: tf.random.stateless_normal([9], own), autograph=False)
        operations = function.get_concrete_function(seed).graph.get_operations()
    np.testing.assert_array_equal(function(seed), expected)
    assert "StatelessRandomGetKeyCounter" not in {each.type for each in operations}


@pytest.mark.parametrize(
    "draw",
    [
        lambda own: tf.random.stateless_uniform([9], own, alg="threefry"),
        lambda own: tf.random.stateless_uniform([9], own, alg="philox"),
        lambda own: tf.random.stateless_uniform([9], own, alg=tf.random.Algorithm.PHILOX),
        lambda own: tf.random.stateless_uniform([9], [1, 2]) + tf.cast(own[0], tf.float32),
    ],
)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_what_a_user_has_chosen_and_what_xla_compiles_is_as_ever(draw, jit_compile):
    def operations(devices):
        function = tf.function(draw, autograph=False, jit_compile=jit_compile)
        with integers_stay(devices):
            graph = function.get_concrete_function(tf.constant([1, 2])).graph
        return [each.type for each in graph.get_operations()]

    assert operations(["GPU:0"]) == operations(["CPU:0"])


def test_what_xla_compiles_draws_by_its_own_generator():
    function = tf.function(
        lambda own: tf.random.stateless_normal([9], own), autograph=False, jit_compile=True
    )
    with integers_stay(["GPU:0"]):
        operations = function.get_concrete_function(tf.constant([1, 2])).graph.get_operations()
    assert "StatelessRandomGetKeyCounter" in {each.type for each in operations}


def test_nothing_of_keras_is_replaced_where_there_is_no_gpu():
    signbit, take = keras_numpy.signbit, keras_numpy.take
    with integers_stay(["/job:worker/task:0/device:CPU:0", "CPU:1"]):
        assert (keras_numpy.signbit, keras_numpy.take) == (signbit, take)
    with integers_stay(["CPU:0", "/device:GPU:1"]):
        assert keras_numpy.signbit is not signbit
        assert keras_numpy.signbit.__name__ == "signbit"  # as who asks for it expects
        assert inspect.signature(keras_numpy.take) == inspect.signature(take)
    assert (keras_numpy.signbit, keras_numpy.take) == (signbit, take)
