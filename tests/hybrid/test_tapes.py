"""Persistent tapes, and tapes in one another, over weights in parts, in the user's own step."""

import itertools

import keras
import pytest
import tensorflow as tf

from tests.helpers import assert_same_training, train
from tests.hybrid.meshes import hybrid

pytestmark = pytest.mark.turns


class TwoLosses(keras.Model):
    """Takes two gradients from one persistent tape."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            scores = self(x, training=True)
            first = self.compute_loss(x, y, scores)
            second = tf.reduce_mean(tf.reduce_sum(scores**2, -1))
        weights = self.trainable_variables
        pairs = zip(tape.gradient(first, weights), tape.gradient(second, weights), strict=True)
        self.optimizer.apply([a + 0.1 * b for a, b in pairs], weights)
        return {"loss": first}


class Smooth(keras.Model):
    """Penalises how fast scores change with the data, which is a gradient itself."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = self(x, training=True)
                total = tf.reduce_sum(scores**2)
            slope = inner.gradient(total, x)
            loss = self.compute_loss(x, y, scores) + 0.1 * tf.reduce_mean(
                tf.reduce_sum(slope**2, -1)
            )
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def three_layers(kind):
    x = keras.Input((6,))
    y = keras.layers.Dense(8, "tanh", name="dense_0")(x)
    y = keras.layers.Dense(8, "tanh", name="dense_1")(y)
    return kind(x, keras.layers.Dense(3, name="dense_2")(y))


def only_loss():
    return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


BY_DEFAULT = [(TwoLosses, {"shard": 2, "pipeline": 2}), (Smooth, {"pipeline": 2, "model": 2})]
MESHES = [
    {"pipeline": 2, "model": 2},
    {"shard": 2, "pipeline": 2},
    {"data": 2, "pipeline": 2},
    {"data": 2, "model": 2},
    {"shard": 2, "model": 2},
]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param(*pair, marks=[] if pair in BY_DEFAULT else pytest.mark.long)
        for pair in itertools.product([TwoLosses, Smooth], MESHES)
    ],
    ids=str,
)
def test_gradients_are_those_of_whole_weights(kind, sizes):
    def build():
        return three_layers(kind)

    reference = train(None, build, only_loss)
    assert_same_training(reference, train(hybrid(sizes), build, only_loss))
