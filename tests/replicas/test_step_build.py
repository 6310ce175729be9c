"""A model is built from its own step, of which no trace is left."""

import contextlib
import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import assert_same_training, train
from tfparallel.replicas.model_optimizers import optimizers_of
from tfparallel.replicas.step_build import _placeholders, build


class CountsCalls(keras.layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight((), "zeros", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1.0)
        self.add_loss(keras.ops.mean(x))
        return x


class Model(keras.Model):
    """Of a dictionary, without `call`, with all that a step could change."""

    def __init__(self):
        super().__init__()
        layers = [CountsCalls(), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
        self.part = keras.Sequential([keras.layers.Dense(3), *layers])
        self.tracker = keras.metrics.Mean(name="mean")
        self.optimizers = {"one": keras.optimizers.Adam(0.1), "more": [keras.optimizers.Nadam()]}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.part(data["x"], training=True)) + sum(self.losses)
        weights = self.trainable_weights
        (_, one, more), gradients = optimizers_of(self), tape.gradient(loss, weights)
        one.apply(gradients[:1], weights[:1])
        more.apply_gradients(zip(gradients[1:], weights[1:], strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def values(model: keras.Model, name: str) -> list:
    """Of the variables whose paths end with `name`."""
    paths = {v.path: v.numpy().tolist() for v in [*model.variables, *model.metrics_variables]}
    return [value for path, value in paths.items() if path.endswith(name)]


@pytest.mark.parametrize("strategy", [None, tfparallel.MirroredStrategy], ids=["plain", "mirrored"])
def test_building_makes_all_variables_and_changes_none(strategy):
    strategy = strategy and strategy(["CPU:0", "CPU:1"])
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Model()
        model.compile()
        build(model, "fit", {"x": np.ones((5, 2), "float32")})
    assert model.losses == []
    assert values(model, "/calls") == [0.0]
    assert values(model, "mean/total") == values(model, "mean/count") == [0.0]
    assert values(model, "moving_mean") == [[0.0, 0.0, 0.0]]
    assert [counter for _, counter in values(model, "seed_generator_state")] == [0]
    assert [o.built for o in optimizers_of(model)] == [False, True, True]
    assert [o.iterations.numpy() for o in optimizers_of(model)] == [0, 0, 0]
    built = [v for o in [model, *optimizers_of(model)] for v in o.variables]
    model.fit({"x": np.ones((5, 2), "float32")}, verbose=0)
    now = [v for o in [model, *optimizers_of(model)] for v in o.variables]
    assert [*map(id, now)] == [*map(id, built)]
    assert [o.iterations.numpy() for o in optimizers_of(model)] == [0, 1, 1]


def test_placeholders_are_what_a_dataset_gives():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    sparse = tf.sparse.from_dense(np.eye(4))
    batch = {"ragged": ragged, "sparse": sparse, "nothing": None, "array": np.ones((2, 3))}
    with tf.Graph().as_default():
        made = _placeholders({**batch, "specs": (tf.TensorSpec((None, 7), tf.int64),)})
    assert isinstance(made["ragged"], tf.RaggedTensor)
    assert made["ragged"].shape.as_list() == [2, None]
    assert isinstance(made["sparse"], tf.SparseTensor)
    assert made["sparse"].shape == (4, 4)
    assert made["nothing"] is None
    assert made["array"].shape == (2, 3)
    assert (made["specs"][0].shape.as_list(), made["specs"][0].dtype) == ([None, 7], tf.int64)


def by_cross_entropy(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        scores = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), True)
        loss = tf.reduce_mean(scores)
    self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
    return {"loss": loss}


def timed(step):
    """A decorator that does not say what it decorates."""

    def around(self, data):
        return step(self, data)

    return around


class Decorated(keras.Model):
    train_step = timed(by_cross_entropy)


def own_step_of_class():
    x = keras.Input((6,))
    return Decorated(x, keras.layers.Dense(3)(x))


def own_step_of_instance():
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3)(x))
    model.train_step = types.MethodType(by_cross_entropy, model)
    return model


@pytest.mark.parametrize("made", [own_step_of_class, own_step_of_instance])
def test_a_step_may_have_another_name(made):
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    one, ours = (train(each, made, compile_options=dict) for each in (None, strategy))
    assert_same_training(one, ours)


@pytest.mark.parametrize("call", ["fit", "train_on_batch", "evaluate", "test_on_batch"])
def test_a_step_that_is_no_method_is_refused(call):
    """It would be given the whole batch on each replica."""
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = own_step_of_instance()
        model.compile()
    model.train_step = functools.partial(by_cross_entropy, model)
    model.test_step = lambda data: {"loss": model(data[0])}
    with pytest.raises(ValueError, match=r"must be plain methods.*types.MethodType"):
        getattr(model, call)(np.ones((4, 6)), np.ones(4))


def test_a_step_that_is_part_of_a_method_is_refused():
    """It is bound to the model, and yet another object each time that it is looked at."""

    class Partial(keras.Model):
        train_step = functools.partialmethod(by_cross_entropy)

    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        x = keras.Input((6,))
        model = Partial(x, keras.layers.Dense(3)(x))
        model.compile()
    with pytest.raises(ValueError, match=r"must be plain methods.*functools.partial"):
        model.fit(np.ones((4, 6)), np.ones(4), verbose=0)
