"""`strategy.all_rows` where no case of the conformance suite comes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import assert_same_training, tiny_data, train
from tfparallel import MirroredStrategy, OneDeviceStrategy

CPUS = [f"CPU:{i}" for i in range(3)]


def test_one_replica_has_all_rows():
    strategy, x = OneDeviceStrategy("CPU:0"), tf.ones([2, 3])
    assert strategy.all_rows(x) is x
    assert strategy.run(lambda: strategy.all_rows(x)) is x


def test_outside_of_a_step_is_an_error():
    strategy = MirroredStrategy(CPUS)
    with pytest.raises(RuntimeError, match="outside of a step"):
        strategy.all_rows(tf.ones([2, 3]))
    with strategy.scope(), pytest.raises(RuntimeError, match="outside of a step"):
        strategy.all_rows(tf.ones([2, 3]))


def test_a_number_has_no_rows():
    strategy = MirroredStrategy(CPUS)
    with pytest.raises(ValueError, match="Received: shapes"):
        strategy.run(lambda: strategy.all_rows(tf.ones([])))


def test_a_custom_loop_sums_what_all_replicas_ask_for():
    """Of uneven parts: replica i has i rows; replica j counts row r with 10 ** j * r."""
    strategy = MirroredStrategy(CPUS)

    @tf.function
    def step():
        def on_replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            own = tf.fill([number, 1], tf.cast(number, tf.float32))
            with tf.GradientTape() as tape:
                tape.watch(own)
                rows, ids = strategy.all_rows((own, tf.fill([number], number)))
                factor = 10.0 ** tf.cast(number, tf.float32)
                loss = factor * tf.reduce_sum(rows[:, 0] * tf.range(3.0))
            return rows, ids, tape.gradient(loss, own)

        return strategy.run(on_replica)

    rows, ids, gradients = map(strategy.experimental_local_results, step())
    for each in range(3):
        np.testing.assert_array_equal(rows[each], [[1], [2], [2]])
        np.testing.assert_array_equal(ids[each], [1, 2, 2])
    assert [g.numpy().tolist() for g in gradients] == [[], [[0]], [[111], [222]]]


def test_more_rows_than_the_batch_has():
    """Two views of each row, one after the other, as SimCLR has them."""

    class TwoViews(keras.Model):
        def __init__(self, strategy):
            super().__init__()
            self.hidden, self._strategy = keras.layers.Dense(3), strategy

        def call(self, x):
            return self.hidden(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            own = tf.concat([y_pred, self(2.0 * x)], 0)
            every = self._strategy.all_rows(own) if self._strategy else own
            return tf.reduce_mean(tf.square(tf.matmul(every, every, transpose_b=True)))

    strategy = MirroredStrategy(CPUS)
    expected = train(None, build=lambda: TwoViews(None), compile_options=dict, data=tiny_data)
    received = train(
        strategy, build=lambda: TwoViews(strategy), compile_options=dict, data=tiny_data
    )
    assert_same_training(expected.results(), received.results(), 1e-5)


def test_in_a_function_of_its_own_is_an_error():
    strategy = MirroredStrategy(CPUS)
    with pytest.raises(RuntimeError, match="a call in a tf.function, tf.cond or loop"):
        strategy.run(lambda: tf.function(strategy.all_rows)(tf.ones([2, 1])))
