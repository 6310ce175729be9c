"""A part of an initial value is drawn alone, with the bits that one device draws for it."""

import functools
import gc
import inspect
import itertools
import math

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
def test_variables_begin_as_on_one_device(dtype):
    strategy = sharded(3)
    # Of those that are drawn whole Keras's own functions have no kernel for bfloat16.
    for name in [name for name in NAMES if name not in WHOLE or dtype != "bfloat16"]:
        shape = (4, 3, 12) if name == "STFT" else (41, 41) if name == "Identity" else SHAPE
        expected = keras.Variable(make(name), shape=shape, dtype=dtype)
        with strategy.scope():
            own = keras.Variable(make(name), shape=shape, dtype=dtype)
        np.testing.assert_array_equal(bits(own.numpy()), bits(expected.numpy()), err_msg=name)


def test_scales_of_a_convolution_are_those_of_the_whole():
    strategy = sharded(4)
    distributions = ["uniform", "truncated_normal", "untruncated_normal"]
    for mode, distribution in itertools.product(["fan_in", "fan_out", "fan_avg"], distributions):
        options = {"mode": mode, "distribution": distribution, "scale": 1.3}
        expected = keras.Variable(make("VarianceScaling", **options), shape=(3, 3, 5, 7))
        with strategy.scope():
            own = keras.Variable(make("VarianceScaling", **options), shape=(3, 3, 5, 7))
        np.testing.assert_array_equal(own.numpy(), expected.numpy(), err_msg=str(options))


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
    return tf.reshape(tf.range(float(math.prod(shape))), shape)


def test_initialisers_of_users_begin_as_on_one_device():
    strategy = sharded(4)
    for make_own in [lambda: Doubled(7), lambda: Named(7), lambda: by_function]:
        expected = keras.Variable(make_own(), shape=SHAPE)
        with strategy.scope():
            own = keras.Variable(make_own(), shape=SHAPE)
        np.testing.assert_array_equal(own.numpy(), expected.numpy(), err_msg=str(make_own()))


def peak_above_stored(build) -> float:
    """What TensorFlow has had in use while it built, above what it has in use then, in bytes."""
    gc.collect()  # what waits for it would be let go of in the middle
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    kept = build()
    after = tf.config.experimental.get_memory_info("CPU:0")
    del kept
    return after["peak"] - max(before, after["current"])


WIDTH = 1024
WHOLE_BYTES = 4 * WIDTH * WIDTH


def test_the_whole_of_a_variable_is_nowhere_while_it_is_made():
    strategy = sharded(4)

    def build(name):
        with strategy.scope():
            return keras.Variable(make(name), shape=(WIDTH, WIDTH))

    for name in [name for name in NAMES if name not in WHOLE]:
        assert peak_above_stored(functools.partial(build, name)) < 0.9 * WHOLE_BYTES, name


def test_what_is_drawn_whole_is_whole_one_variable_at_a_time():
    strategy, width = sharded(4), 256

    def build(make_own):
        with strategy.scope():
            return [keras.Variable(make_own(), shape=(width, width)) for _ in range(12)]

    # Orthogonal itself has what is drawn, both factors and their product.
    for make_own, wholes in [(lambda: make("Orthogonal"), 4), (lambda: by_function, 3)]:
        # The least of two, and room for one whole more: TensorFlow lets go of tensors on threads of
        # its own, which may be late. All twelve at once would be 12 wholes at least.
        peak = min(peak_above_stored(functools.partial(build, make_own)) for _ in range(2))
        assert peak <= (wholes + 1) * 4 * width * width


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
