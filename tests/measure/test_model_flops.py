"""Operations counted from a graph, against formulas written out."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfparallel.measure.model_flops import flops_of_step
from tfparallel.measure.peak import measured_flops_per_s

ROWS = 4


def counted(model, *shape, dtype="float32"):
    return flops_of_step(model, tf.TensorSpec([ROWS, *shape], dtype))


def test_dense_layers():
    """Forward, gradient of weights; gradient of inputs where a layer stands before."""
    model = keras.Sequential([keras.Input((7,)), layers.Dense(5, "relu"), layers.Dense(3)])
    assert counted(model, 7) == 2 * ROWS * (2 * 7 * 5 + 3 * 5 * 3)


def test_convolutions():
    """6 x 6 places, 3 x 3 kernels."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, padding="same"),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.Conv2D(5, 3, padding="same"),
        ]
    )
    places = ROWS * 36 * 9
    assert counted(model, 6, 6, 2) == 2 * places * (2 * 2 * 4 + 3 * 4 + 3 * 4 * 5)


def test_attention():
    """Four projections of [rows, 6, 8], scores and their sum; by einsum."""
    inputs = keras.Input((6, 8))
    model = keras.Model(
        inputs, layers.MultiHeadAttention(2, 4, flash_attention=False)(inputs, inputs)
    )
    projections = 2 * ROWS * 6 * 8 * 8
    scores = 2 * ROWS * 2 * 6 * 6 * 4
    # q, k and v: no gradient of the data; the output's projection and both products: all three.
    assert counted(model, 6, 8) == 3 * 2 * projections + 3 * projections + 2 * 3 * scores


def test_a_loop_runs_as_often_as_it_has_steps():
    """An LSTM over 5 steps; the product of inputs is inside of the loop, too."""
    units, size, steps = 3, 4, 5
    model = keras.Sequential([keras.Input((steps, size)), layers.LSTM(units)])
    found = counted(model, steps, size)
    inputs, states = 2 * ROWS * size * 4 * units, 2 * ROWS * units * 4 * units
    forward = steps * (inputs + states)
    # Backwards: of both kernels, and of the states; of the data it may be computed for nothing.
    assert steps * (2 * inputs + 3 * states) <= found <= 3 * forward


def test_weights_are_those_of_any_strategy():
    import tfparallel

    with tfparallel.MirroredStrategy(2).scope():
        model = keras.Sequential([keras.Input((7,)), layers.Dense(5, "relu"), layers.Dense(3)])
    assert counted(model, 7) == 2 * ROWS * (2 * 7 * 5 + 3 * 5 * 3)


def test_unknown_lengths_are_refused():
    model = keras.Sequential([keras.Input((None, 4)), layers.Dense(5)])
    with pytest.raises(ValueError, match="fixed"):
        flops_of_step(model, tf.TensorSpec([ROWS, None, 4]))


def test_a_measured_peak_is_above_what_a_slow_product_reaches():
    """Nothing on a CPU is below a gigaflop a second or above 100 tera."""
    assert 1e9 < measured_flops_per_s(["CPU:0"]) < 1e14
