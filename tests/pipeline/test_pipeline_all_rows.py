"""Layers of a pipeline that gather the rows of all microbatches (`strategy.all_rows`)."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests import helpers
from tests.helpers import assert_same_training, in_float64, tiny_compile_options, train
from tfparallel import HybridStrategy, PipelineOptions, PipelineStrategy

pytestmark = pytest.mark.turns

CPUS = [f"CPU:{i}" for i in range(4)]
ATOL = 1e-9


@pytest.fixture(autouse=True)
def _float64():
    with in_float64():
        yield


def tiny_data(rows: int):
    x, y = helpers.tiny_data(rows)
    return x.astype("float64"), y


def all_rows_of(strategy) -> Callable:
    return strategy.all_rows if strategy else lambda rows: rows


class Centered(layers.Layer):
    """Takes off the mean of all rows, of what its own weight has made of them."""

    def __init__(self, strategy, name: str | None = None):
        super().__init__(name=name)
        self._all_rows, self.inner = all_rows_of(strategy), layers.Dense(4, "tanh")

    def call(self, x):
        own = self.inner(x)
        return own - ops.mean(self._all_rows(own), axis=0)


class Counting(Centered):
    """And counts its calls, and adds to the loss a mean over its own rows."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", trainable=False, initializer="zeros")
        super().build(shape)

    def call(self, x):
        self.calls.assign_add(1.0)
        y = super().call(x)
        self.add_loss(0.1 * ops.mean(ops.square(y)))
        return y


def sequential(strategy) -> keras.Model:
    """Layers of the gathering layer's stage before it and behind it."""
    between = [layers.Dense(5, "tanh"), Counting(strategy), layers.Dense(4, "tanh")]
    return keras.Sequential([keras.Input((6,)), *between, layers.Dense(3), layers.Dense(3)])


def two_of_them(strategy) -> keras.Model:
    x = keras.Input((6,))
    side = Centered(strategy)(x)
    y = Centered(strategy)(layers.Dense(5, "tanh")(x))
    return keras.Model(x, layers.Dense(3)(layers.Concatenate()([side, layers.Dense(4)(y)])))


def nested(strategy) -> keras.Model:
    inner = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4), Centered(strategy), layers.Dense(4, "tanh")]
    )
    return keras.Sequential([keras.Input((6,)), inner, layers.Dense(4, "tanh"), layers.Dense(3)])


class Subclassed(keras.Model):
    def __init__(self, strategy):
        super().__init__()
        self.first, self.centered = layers.Dense(5, "tanh"), Centered(strategy)
        self.again, self.last = Centered(strategy), layers.Dense(3)

    def call(self, x):
        return self.last(self.again(self.centered(self.first(x))))


MODELS = {
    "sequential": sequential,
    "two_of_them": two_of_them,
    "nested": nested,
    "subclassed": Subclassed,
}
# Microbatches are uneven, and in the last batch fewer than there are rows for.
OPTIONS = {"data": tiny_data, "rows": 7, "batch_size": 5}


def trained(strategy, build: Callable, **options):
    training = train(strategy, lambda: build(strategy), tiny_compile_options, **OPTIONS, **options)
    x, y = tiny_data(7)
    training.extra["evaluated"] = training.model.evaluate(x, y, batch_size=5, verbose=0)
    training.extra["predicted"] = training.model.predict(x, batch_size=5, verbose=0)
    return training


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.long] * (x != "two_of_them")) for x in MODELS]
)
def test_trains_as_on_one_device(name):
    strategy = PipelineStrategy(CPUS[:2], 3)
    assert_same_training(trained(None, MODELS[name]), trained(strategy, MODELS[name]), ATOL)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe"},
        {"schedule": "zero_bubble"},
        {"schedule": "interleaved_1f1b"},
        {"rematerialize": "full"},
        {"offload": True},
    ],
    ids=lambda options: "_".join(map(str, options.values())),
)
def test_under_other_schedules(name, options):
    strategy = PipelineStrategy(CPUS[:2], 3, **options)
    assert_same_training(trained(None, MODELS[name]), trained(strategy, MODELS[name]), ATOL)


@pytest.mark.long
def test_on_several_pipelines():
    mesh = keras.distribution.DeviceMesh((2, 2), ("data", "pipeline"), [c.lower() for c in CPUS])
    strategy = HybridStrategy(mesh, pipeline=PipelineOptions(2))
    assert_same_training(trained(None, sequential), trained(strategy, sequential), ATOL)


@pytest.mark.long
def test_eagerly():
    def build(strategy):
        model = sequential(strategy)
        compile_model = model.compile
        model.compile = lambda **options: compile_model(**options, run_eagerly=True)
        return model

    strategy = PipelineStrategy(CPUS[:2], 3)
    assert_same_training(trained(None, sequential), trained(strategy, build), ATOL)


class Normalizing(Centered):
    """Its averages are deferred, though other microbatches come to it while it waits."""

    def __init__(self, strategy):
        super().__init__(strategy)
        self.norm = layers.BatchNormalization(momentum=0.9)

    def call(self, x, training=None):
        return self.norm(super().call(x), training=training)


def test_averages_that_are_deferred_behind_a_gathering():
    def build(strategy):
        layer = Normalizing(strategy)
        return keras.Sequential([keras.Input((6,)), layer, layers.Dense(3)])

    strategy = PipelineStrategy(CPUS[:2], 3, batch_norm="deferred")
    training = train(strategy, lambda: build(strategy), tiny_compile_options, **OPTIONS, epochs=1)
    norm = training.model.layers[0].norm
    # What is normalised has a mean of zero over each batch, whatever the weights are.
    np.testing.assert_allclose(norm.moving_mean, np.zeros(4), atol=ATOL)


def test_such_layers_are_measured_as_others(recwarn):
    strategy = PipelineStrategy(CPUS[:2], 2)
    with strategy.scope():
        model = sequential(strategy)
    strategy.summary(model)
    assert not [each for each in recwarn if "count by their numbers of weights" in str(each)]


def test_in_a_branch_of_a_layer_is_an_error():
    strategy = PipelineStrategy(CPUS[:2], 2)

    class Branches(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(initializer="ones", name="scale")

        def call(self, x):
            x, scale = self.scale * x, tf.convert_to_tensor(self.scale)
            return tf.cond(scale > 0, lambda: x - strategy.all_rows(x)[:1], lambda: x)

    def build():
        return keras.Sequential([keras.Input((6,)), Branches(), layers.Dense(3)])

    with pytest.raises(RuntimeError, match="a call in a tf.function, tf.cond or loop"):
        train(strategy, build, tiny_compile_options, data=tiny_data)
