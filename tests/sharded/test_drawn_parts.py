"""A part of an initial value is drawn alone, with the bits that one device draws for it."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

SHAPE = (41, 51)  # of which no third, or fourth, begins at a multiple of four numbers
WHOLE = {"Identity", "Orthogonal", "STFT"}  # of which no number is known without others
ARGUMENTS = {
    "Constant": {"value": -1 / 3},
    "RandomNormal": {"mean": 0.3, "stddev": 0.7},
    "RandomUniform": {"minval": -0.1, "maxval": 1.7},
    "TruncatedNormal": {"mean": 0.3, "stddev": 0.7},
    "STFT": {"window": None},
}
NAMES = sorted(
    {
        value.__name__
        for value in vars(keras.initializers).values()
        if inspect.isclass(value) and value is not keras.initializers.Initializer
    }
)


def make(name: str, seed=7, **arguments) -> keras.initializers.Initializer:
    of_class = getattr(keras.initializers, name)
    has_seed = "seed" in inspect.signature(of_class).parameters
    return of_class(**ARGUMENTS.get(name, {}), **arguments, **({"seed": seed} if has_seed else {}))


def sharded(devices: int, **options):
    options = {"min_size": 1, **options}
    return tfparallel.ShardedStrategy([f"CPU:{i}" for i in range(devices)], **options)


def bits(value) -> np.ndarray:
    return np.asarray(value).view(f"V{np.asarray(value).dtype.itemsize}")


def test_all_initialisers_of_keras_are_here():
    assert len(NAMES) >= 14 and set(NAMES) > WHOLE


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_variables_begin_as_on_one_device(name, dtype):
    if name in WHOLE and dtype == "bfloat16":
        pytest.skip("Keras's own function has no kernel for it")
    shape = (4, 3, 12) if name == "STFT" else (41, 41) if name == "Identity" else SHAPE
    expected = keras.Variable(make(name), shape=shape, dtype=dtype)
    with sharded(3).scope():
        variable = keras.Variable(make(name), shape=shape, dtype=dtype)
    np.testing.assert_array_equal(bits(variable.numpy()), bits(expected.numpy()))


@pytest.mark.parametrize("distribution", ["uniform", "truncated_normal", "untruncated_normal"])
@pytest.mark.parametrize("mode", ["fan_in", "fan_out", "fan_avg"])
def test_scales_of_a_convolution_are_those_of_the_whole(mode, distribution):
    def variable():
        options = {"mode": mode, "distribution": distribution, "scale": 1.3}
        return keras.Variable(make("VarianceScaling", **options), shape=(3, 3, 5, 7))

    with sharded(4).scope():
        own = variable()
    np.testing.assert_array_equal(own.numpy(), variable().numpy())


def test_a_generator_of_seeds_moves_on_once_for_each_variable():
    def values():
        generator = keras.random.SeedGenerator(3)
        shapes = [SHAPE, (3,), SHAPE]  # the second is whole
        drawn = [make("HeNormal", seed=generator), make("RandomUniform", seed=generator)] * 2
        return [
            keras.Variable(each, shape=s).numpy() for each, s in zip(drawn, shapes, strict=False)
        ]

    with sharded(4, min_size=10).scope():
        own = values()
    for received, expected in zip(own, values(), strict=True):
        np.testing.assert_array_equal(received, expected)


class Doubled(keras.initializers.HeNormal):
    """Computes in a way of its own."""

    def __call__(self, shape, dtype=None):
        return 2 * super().__call__(shape, dtype)


class Named(keras.initializers.HeNormal):
    """Computes as its class does."""


def by_function(shape, dtype=None):
    return tf.reshape(tf.range(41.0 * 51), shape)


@pytest.mark.parametrize("make_own", [lambda: Doubled(7), lambda: Named(7), lambda: by_function])
def test_initialisers_of_users_begin_as_on_one_device(make_own):
    with sharded(4).scope():
        own = keras.Variable(make_own(), shape=SHAPE)
    np.testing.assert_array_equal(own.numpy(), keras.Variable(make_own(), shape=SHAPE).numpy())


def peak_above_stored(build) -> float:
    """What TensorFlow has had in use while it built, above what it has in use then, in bytes."""
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    kept = build()
    after = tf.config.experimental.get_memory_info("CPU:0")
    del kept
    return after["peak"] - max(before, after["current"])


WIDTH = 1024
WHOLE_BYTES = 4 * WIDTH * WIDTH


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WHOLE])
def test_the_whole_of_a_variable_is_nowhere_while_it_is_made(name):
    strategy = sharded(4)

    def build():
        with strategy.scope():
            return keras.Variable(make(name), shape=(WIDTH, WIDTH))

    assert peak_above_stored(build) < 0.9 * WHOLE_BYTES


def test_the_whole_of_no_weight_or_slot_is_anywhere_while_a_model_is_made():
    strategy = sharded(4)

    def build():
        with strategy.scope():
            layers = [keras.layers.Dense(WIDTH) for _ in range(3)]
            model = keras.Sequential([keras.Input((WIDTH,)), *layers])
            model.compile(keras.optimizers.AdamW(use_ema=True), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    assert peak_above_stored(build) < 0.9 * WHOLE_BYTES
