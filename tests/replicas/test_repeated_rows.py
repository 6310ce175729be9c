"""Which entries of a sparse gradient are of no row of the batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel import MirroredStrategy
from tfparallel.replicas.repeated_rows import added_up, is_of_no_row


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (lambda tokens: keras.ops.arange(5), True),
        (lambda tokens: tf.range(tf.shape(tokens)[1]), True),
        (lambda tokens: tf.range(tf.shape(tokens)[0]), False),
        (lambda tokens: tf.range(tf.size(tokens)), False),
        (lambda tokens: tokens, False),
        (lambda tokens: tf.range(5) + tokens[0], False),
        (lambda tokens: tf.random.uniform([5], 0, 3, tf.int32), False),
    ],
    ids=["constant", "length", "rows", "size", "tokens", "first row", "random"],
)
def test_what_no_row_decides_on(indices, expected):
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def step(tokens):
        found.append(is_of_no_row(indices(tokens)))
        return tokens

    step(tf.zeros([2, 5], tf.int32))
    assert found == [expected]


def test_entries_of_replicas_are_added_up_position_by_position():
    @tf.function
    def step():
        own = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([4, 4]), tf.constant([5, 3]))
        values = tf.reshape(tf.range(12.0), [4, 3])
        total = tf.IndexedSlices(values, tf.constant([4, 4, 4, 4], tf.int64), tf.constant([5, 3]))
        return added_up(own, total)

    received = step()
    np.testing.assert_array_equal(received.values, [[6, 8, 10], [12, 14, 16]])
    assert received.indices.numpy().tolist() == [4, 4]


def test_a_custom_loop_updates_as_one_device_does():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    weights = [_train(each).get_weights() for each in (None, strategy)]
    for one, two in zip(*weights, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


def _train(strategy):
    scope = (strategy or tf.distribute.get_strategy()).scope
    with scope():
        keras.utils.set_random_seed(0)
        table, optimizer = keras.layers.Embedding(4, 2), keras.optimizers.Adam(0.1)
        table.build((None,))
        optimizer.build(table.trainable_variables)

    def replica_step(x, share):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((table(tf.range(4)) - x) ** 2) * share
        (gradient,) = tape.gradient(loss, table.trainable_variables)
        optimizer.apply([gradient], table.trainable_variables)

    @tf.function
    def step(x):
        if strategy is None:
            replica_step(x, 1.0)
        else:
            strategy.run(replica_step, (x, 0.5))

    rng = np.random.default_rng(0)
    for _ in range(3):
        step(tf.constant(rng.normal(size=(6, 4, 2)), tf.float32))
    return table
