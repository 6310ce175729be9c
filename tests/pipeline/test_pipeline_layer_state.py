"""PipelineStrategy: layers that assign their variables in a forward pass."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.helpers import assert_same_training, tiny_compile_options, tiny_data, train
from tfparallel import PipelineStrategy

pytestmark = pytest.mark.turns

CPUS = ["CPU:0", "CPU:1"]


class CountsFeatures(layers.Layer):
    """Has a whole number that depends on rows."""

    def build(self, shape):
        self.rows = self.add_weight(name="rows", trainable=False, dtype="int32")

    def call(self, x):
        self.rows.assign_add(ops.sum(ops.cast(x > 0, "int32")))
        return x


class AssignsInBranch(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(name="calls", trainable=False, initializer="zeros")

    def call(self, x):
        tf.cond(tf.reduce_sum(x) > 0, lambda: (self.calls.assign(1.0), 0)[1], lambda: 0)
        return x


class Counts(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(name="calls", trainable=False, initializer="zeros")

    def call(self, x):
        self.calls.assign_add(1)
        return x


def between(layer):
    return lambda: keras.Sequential([keras.Input((6,)), layer(name="own"), layers.Dense(3)])


class Centers(layers.Layer):
    """Returns its rows less their moving average, which they are in already."""

    def build(self, shape):
        self.average = self.add_weight(name="average", shape=shape[1:], trainable=False)

    def call(self, x):
        self.average.assign(0.9 * self.average + 0.1 * ops.mean(x, axis=0))
        return x - self.average


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_whole_numbers_that_depend_on_rows(run_eagerly):
    def options():
        return {**tiny_compile_options(), "run_eagerly": run_eagerly}

    strategy = PipelineStrategy(CPUS, 3)
    own = train(strategy, between(CountsFeatures), options, epochs=1)
    assert_same_training(train(None, between(CountsFeatures), options, epochs=1), own)


def test_a_layer_called_twice_of_which_the_state_depends_on_rows():
    def build():
        inputs, own = keras.Input((6,)), CountsFeatures()
        return keras.Model(inputs, layers.Dense(3)(own(layers.Dense(6)(own(inputs)))))

    strategy = PipelineStrategy(CPUS, 3, "gpipe", rematerialize="full")
    assert_same_training(train(None, build), train(strategy, build))


def test_a_row_that_needs_later_rows_is_refused():
    with pytest.raises(ValueError, match="just assigned from the rows.*layer 'own'.*behind"):
        train(PipelineStrategy(CPUS, 3), between(Centers))


def test_a_model_that_assigns_whole_numbers_of_rows_is_refused():
    class CountsRows(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.hidden, self.scores = layers.Dense(4), layers.Dense(3)

        def build(self, shape):
            self.rows = self.add_weight(name="rows", trainable=False, dtype="int32")
            super().build(shape)

        def call(self, x):
            y = self.hidden(x)
            self.rows.assign_add(ops.sum(ops.cast(y > 0, "int32")))
            return self.scores(y)

    with pytest.raises(ValueError, match="'rows' of layer 'own' of type int32.*metric"):
        train(PipelineStrategy(CPUS, 3), CountsRows)


def test_assigning_in_a_branch_is_refused():
    with pytest.raises(ValueError, match="tf.cond.*'calls' of layer 'own'.*behind"):
        train(PipelineStrategy(CPUS, 2), between(AssignsInBranch))


def test_predict_calls_a_layer_once_per_batch():
    training = train(PipelineStrategy(CPUS, 3), between(Counts), epochs=1)
    counter = training.model.get_layer("own").calls
    before = counter.numpy()
    training.model.predict(tiny_data(12)[0], batch_size=4, verbose=0)
    assert counter.numpy() == before + 3


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_spectral_normalization_under_other_schedules(schedule):
    def build():
        first = layers.SpectralNormalization(layers.Dense(5, activation="tanh"))
        second = layers.SpectralNormalization(layers.Dense(4, activation="tanh"))
        return keras.Sequential([keras.Input((6,)), first, second, layers.Dense(3)])

    strategy = PipelineStrategy(CPUS, 3, schedule, rematerialize="full")
    assert_same_training(train(None, build), train(strategy, build))


def test_averages_deferred_in_a_model_without_input():
    """Keras creates its variables late, from the first batch."""

    def build():
        return keras.Sequential([layers.BatchNormalization(momentum=0.9), layers.Dense(3)])

    strategy = PipelineStrategy(CPUS, 3, batch_norm="deferred")
    training = train(strategy, build, rows=13, epochs=1)
    x, _ = tiny_data(13)
    np.testing.assert_allclose(training.model.layers[0].moving_mean, 0.1 * x.mean(0), atol=1e-6)
