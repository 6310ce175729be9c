"""Which steps are refused for what they assign to weights; the conformance cases train them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.replicas.step_build import build

ROWS = np.ones((4, 3), "float32")


class Own(keras.Model):
    """A step that does `assign(model, rows)`."""

    def __init__(self, assign):
        super().__init__()
        self.dense, self.recurrent = keras.layers.Dense(3), keras.layers.LSTM(3)
        self.assign = assign

    def call(self, x):
        return self.recurrent(self.dense(x)[:, None])

    def train_step(self, x):
        loss = tf.reduce_mean(self(x))
        self.assign(self, x)
        return {"loss": loss}


def gradient(model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    return tape.gradient(loss, model.dense.kernel.value)


def moves(model, x):
    model.dense.kernel.assign_sub(gradient(model, x))


def moves_a_frozen_weight(model, x):
    model.dense.trainable = False
    model.dense.bias.assign(tf.reduce_mean(x, axis=0))


def moves_by_a_sum(model, x):
    every = tf.distribute.get_replica_context().all_reduce("SUM", gradient(model, x))
    model.dense.kernel.assign_sub(every)


def moves_by_all_rows(model, x):
    moves(model, tf.distribute.get_strategy().all_rows(x))


def clips(model, x):
    model.dense.kernel.assign(tf.clip_by_value(model.dense.kernel, -1.0, 1.0))


def calls_a_function(model, x):
    tf.function(model.dense)(x)


def built(assign, **options) -> Own:
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = Own(assign)
        model.compile(**options)
        build(model, "fit", ROWS)
    return model


@pytest.mark.parametrize("assign", [moves, moves_a_frozen_weight])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_depends_on_a_replicas_own_rows_is_refused(assign, run_eagerly):
    with pytest.raises(ValueError, match=r"must not assign to a weight .*MirroredStrategy"):
        built(assign, run_eagerly=run_eagerly)


@pytest.mark.parametrize("assign", [moves_by_a_sum, moves_by_all_rows, clips, calls_a_function])
def test_what_is_the_same_on_all_replicas_is_not(assign):
    assert built(assign).built


def test_one_replica_has_all_rows():
    with tfparallel.OneDeviceStrategy("CPU:0").scope():
        model = Own(moves)
        model.compile()
        build(model, "fit", ROWS)
    assert model.built
