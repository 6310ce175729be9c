"""Which numbers that a step returns are said to be no means over rows."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfparallel
from tfparallel.replicas.step_build import build

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


class Step(keras.Model):
    """Its step returns `outputs(model, x, loss, gradients)`."""

    def __init__(self, outputs):
        super().__init__()
        self.layer, self.outputs_of = keras.layers.Dense(3), outputs
        self.tracker = keras.metrics.Mean(name="tracked")

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.layer(x)))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients, weights)
        self.tracker.update_state(loss)
        return self.outputs_of(self, x, loss, gradients)


def means(model, x, loss, gradients):
    result = {"tracked": model.tracker.result(), "double": 2 * loss}
    state = {"rate": model.optimizer.learning_rate, "kernel": ops.norm(model.layer.kernel)}
    return {"loss": loss, **result, **state, "values": model.layer(x), "none": None}


def others(model, x, loss, gradients):
    numbers = {"all": ops.max(x), "rows": ops.shape(x)[0]}
    model.tracker.update_state(ops.log(loss))
    return {"norm": tf.linalg.global_norm(gradients), "of": numbers}


@pytest.mark.parametrize(
    ("outputs", "named"), [(means, ""), (others, "'norm', 'of/all', 'of/rows', 'tracked'")]
)
def test_numbers_that_are_no_means_are_named(outputs, named, caplog):
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = Step(outputs)
        model.compile(optimizer="sgd")
        with caplog.at_level(logging.WARNING):
            build(model, "fit", ROWS)
    messages = [each.getMessage() for each in caplog.records]
    told = [each for each in messages if "no mean over rows" in each]
    assert len(told) == bool(named)
    assert all(f"what is no mean over rows: {named}." in each for each in told)
