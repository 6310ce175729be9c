"""Which steps are refused for what they assign; the conformance cases train them."""

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
        self.mean = keras.Variable(np.zeros(3, "float32"), trainable=False, name="mean")
        self.queue = keras.Variable(np.zeros((8, 3), "float32"), trainable=False, name="queue")
        self.seed = keras.random.SeedGenerator(1)
        self.count = keras.Variable(0, trainable=False, dtype="int32", name="count")
        self.largest = tf.Variable(0.0, trainable=False)
        self.each = [tf.Variable(0.0, trainable=False) for _ in range(2)]

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


def moves_in_a_function(model, x):
    tf.function(lambda: moves(model, x))()


def moves_in_a_branch(model, x):
    tf.cond(tf.reduce_mean(x) > 0, lambda: clips(model, x), lambda: None)


def moves_in_a_loop(model, x):
    def body(mean):
        model.dense.bias.assign(mean * tf.ones(3))
        return (mean + tf.reduce_mean(x),)

    tf.while_loop(lambda mean: mean < 5, body, (tf.zeros(()),))


def keeps_a_queue(model, x):
    model.queue.assign(tf.concat([x, model.queue], 0)[:8])


def keeps_a_spread(model, x):
    model.mean.assign(tf.math.reduce_std(model.dense(x), 0))


def keeps_the_largest(model, x):
    model.largest.assign(tf.maximum(model.largest, tf.reduce_max(x)))


def keeps_the_largest_in_a_list(model, x):
    model.each[1].assign(tf.maximum(model.each[1], tf.reduce_max(x)))


def learns_faster(model, x):
    model.optimizer.learning_rate.assign(0.1 * tf.reduce_mean(tf.abs(x)))


def learns_slower(model, x):
    model.optimizer.learning_rate.assign(0.9 * model.optimizer.learning_rate)


def counts_rows(model, x):
    model.count.assign_add(tf.shape(x)[0])


def keeps_a_mean_in_a_branch(model, x):
    tf.cond(model.count < 5, lambda: keeps_a_mean(model, x), lambda: None)


def keeps_a_mean(model, x):
    rows = tf.cast(tf.shape(x)[0], tf.float32)
    dropped = keras.random.dropout(model.dense(x), 0.5, seed=model.seed)
    model.mean.assign(0.9 * model.mean + 0.1 * tf.reduce_sum(dropped, 0) / rows)


def keeps_a_queue_of_all_rows(model, x):
    keeps_a_queue(model, tf.distribute.get_strategy().all_rows(x))


def counts_batches_in_a_branch(model, x):
    tf.cond(model.count < 5, lambda: counts_batches(model, x), lambda: None)


def counts_batches(model, x):
    model.count.assign_add(1)


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


@pytest.mark.parametrize(
    "assign",
    [
        *(moves, moves_a_frozen_weight, moves_in_a_function, moves_in_a_branch, moves_in_a_loop),
        learns_faster,
    ],
)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_depends_on_a_replicas_own_rows_is_refused(assign, run_eagerly):
    with pytest.raises(ValueError, match=r"must not assign to a weight .*MirroredStrategy"):
        built(assign, run_eagerly=run_eagerly)


STATE = [
    *(keeps_a_queue, keeps_a_spread, keeps_the_largest, keeps_the_largest_in_a_list, counts_rows),
    keeps_a_mean_in_a_branch,
]


@pytest.mark.parametrize("assign", STATE)
def test_state_of_which_no_mean_is_that_of_all_rows_is_refused(assign):
    with pytest.raises(ValueError, match="must be a mean over rows, .*"):
        built(assign)


ALIKE = [
    *(moves_by_a_sum, moves_by_all_rows, clips, calls_a_function, keeps_a_mean),
    *(keeps_a_queue_of_all_rows, counts_batches, counts_batches_in_a_branch, learns_slower),
]


@pytest.mark.parametrize("assign", ALIKE)
def test_what_is_the_same_on_all_replicas_is_not(assign):
    assert built(assign).built


def test_one_replica_has_all_rows():
    with tfparallel.OneDeviceStrategy("CPU:0").scope():
        model = Own(moves)
        model.compile()
        build(model, "fit", ROWS)
    assert model.built
