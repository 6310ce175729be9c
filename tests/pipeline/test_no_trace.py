"""Layers are measured, and a step is profiled, without a trace."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.helpers import momentum_sgd
from tfparallel import PipelineStrategy
from tfparallel.internals import GLOBAL_SEED_GENERATOR, global_state

pytestmark = pytest.mark.turns

CPUS = ["CPU:0", "CPU:1"]
SHAPE = (8, 8, 3)


class Changing(layers.Layer):
    """Changes in a call all that a layer can hold."""

    def __init__(self):
        super().__init__()
        self.number, self.seen, self.by_name = 0, [1, [2]], {"calls": 0, "inner": {"calls": 0}}
        self.names, self.array, self.pair = set(), np.zeros(2), ([0], {"x": 1})
        self.metric = keras.metrics.Mean()
        self.seed = keras.random.SeedGenerator(3)
        self.own = tf.Variable(1.0, trainable=False)
        self.listed = [tf.Variable([1.0, 2.0])]
        self.generator = tf.random.Generator.from_seed(3)

    def build(self, shape):
        self.weight = self.add_weight(name="weight", trainable=False, initializer="zeros")
        self.kernel = self.add_weight(name="kernel", initializer="ones")
        self.count = self.add_weight(name="count", trainable=False, dtype="int32")

    def call(self, x):
        self.number += 1
        self.seen.append(self.number)
        self.seen[1].append(self.number)
        self.by_name["calls"] += 1
        self.by_name["inner"]["calls"] += 1
        self.names.add(self.number)
        self.array += 1
        self.pair[0].append(1)
        self.another = self.number
        self.weight.assign_add(1)
        self.kernel.assign(self.kernel * 2)
        self.count.assign_add(1)
        self.own.assign_add(1)
        self.listed[0].assign_add([1.0, 1.0])
        self.metric.update_state(ops.mean(x))
        self.add_loss(ops.mean(x))
        random.random(), np.random.random()
        noise = self.generator.normal([]) + tf.random.uniform([]) + ops.mean(x)
        return x + noise + keras.random.uniform(()) + keras.random.uniform((), seed=self.seed)

    def compute_output_shape(self, shape):
        return shape


def of_images():
    """Layers of Keras with weights, statistics, seeds."""
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            layers.RandomFlip(seed=1),
            layers.RandomRotation(0.1),
            layers.RandomZoom(0.1),
            layers.RandomContrast(0.1),
            layers.GaussianNoise(0.1),
            Changing(),
            layers.SpectralNormalization(layers.Conv2D(4, 3)),
            layers.BatchNormalization(),
            layers.SpatialDropout2D(0.5),
            layers.DepthwiseConv2D(3, depthwise_regularizer="l2"),
            layers.GroupNormalization(2),
            layers.ActivityRegularization(0.1),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.changing = Changing()
        self.recurrent = layers.GRU(4, dropout=0.5, recurrent_dropout=0.5)
        self.attention = layers.MultiHeadAttention(2, 2, dropout=0.5)
        self.calls, self.scores = [], layers.Dense(3)

    def call(self, x):
        self.calls.append(1)
        x = ops.reshape(self.changing(x), (-1, 64, 3))
        return self.scores(self.recurrent(self.attention(x, x)))


def random_state():
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    drawn = None if generator is None else generator.state.numpy().tolist()
    return str(random.getstate()), str(np.random.get_state()), drawn


def state_of(model):
    """All that `Changing` changes, and every other weight."""
    changing = next(x for x in model._flatten_layers() if isinstance(x, Changing))
    variables = {v.path: v.numpy() for v in [*model.variables, *model.metrics_variables]}
    optimizer = [v.numpy() for v in model.optimizer.variables]
    own = [tf.convert_to_tensor(x).numpy() for x in (changing.own, *changing.listed)]
    held = [changing.number, changing.seen, changing.by_name, changing.names, changing.pair]
    return {
        **variables,
        "optimizer": str(optimizer),
        "own": str([*own, changing.generator.state.numpy()]),
        "attributes": str([*held, changing.array, changing.another]),
        "losses": len(model.losses),
        "calls": str(getattr(model, "calls", None)),
        "names": str(global_state.get_global_attribute("object_name_uids")),
    }


def compiled(strategy, build):
    keras.utils.set_random_seed(4)
    with strategy.scope():
        model = build()
        model.compile(optimizer=momentum_sgd(), loss="mse", metrics=["mae"])
        model._symbolic_build(data_batch=(np.ones([2, *SHAPE]), np.ones([2, 3]), None))
        model.optimizer.build(model.trainable_variables)
    return model


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], name)


@pytest.mark.parametrize(
    ("build", "has_drawn"), [(of_images, False), (of_images, True), (Subclassed, False)]
)
def test_measuring(build, has_drawn):
    strategy = PipelineStrategy(CPUS, 2)
    model = compiled(strategy, build)
    if has_drawn:
        keras.random.uniform((2,))
    x = np.random.default_rng(0).uniform(size=(2, *SHAPE)).astype("float32")
    strategy.extended._batches._inputs[model] = tf.constant(x)  # as `fit` notes it
    before, drawn = state_of(model), random_state()
    stages = strategy.stages(model)
    assert stages.time_shares is not None and stages.activation_bytes[0] > 0
    assert random_state() == drawn
    assert_same(before, state_of(model))
    following = tf.random.uniform([2]).numpy()
    keras.utils.set_random_seed(4)
    np.testing.assert_array_equal(following, tf.random.uniform([2]))
    with strategy.scope():
        model(x)
    assert state_of(model)["attributes"] != before["attributes"]  # it does change in a call
    assert state_of(model)["own"] != before["own"]


def test_profiling():
    strategy = PipelineStrategy(CPUS, 2)
    model = compiled(strategy, of_images)
    x, y = np.ones([4, *SHAPE], "float32"), np.ones([4, 3])
    model.train_on_batch(x, y)
    before, drawn = state_of(model), random_state()
    strategy.profile(model, (x, y))
    assert_same(before, state_of(model))
    assert random_state() == drawn
    model.train_on_batch(x, y)
    assert state_of(model)["own"] != before["own"]
