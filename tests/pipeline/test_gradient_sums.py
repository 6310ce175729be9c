"""Gradients of microbatches are summed on their stage, those of no rows as zeros."""

import numpy as np
import tensorflow as tf

from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.gradient_sums import sum_gradients, sum_over_pipelines
from tfparallel.pipeline.plans.schedules.registry import build_schedule

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(2)]
NUM_MICROBATCHES = 3


def test_sums_are_on_the_stages_of_their_gradients():
    with tf.device(DEVICES[0]):
        first, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2]))
    with tf.device(DEVICES[1]):
        second = tf.Variable(3.0)
    variables = [first, table, second]

    @tf.function(autograph=False)
    def step(rows):
        executor = Executor(build_schedule("1f1b", 2, NUM_MICROBATCHES), DEVICES)
        gradients = []
        for m in range(NUM_MICROBATCHES):
            x = tf.fill([2], float(m + 1))
            with tf.GradientTape() as tape:
                (y,) = executor.call(0, m, "a", lambda x: [first * x + tf.gather(table, 1)], [x])
                (z,) = executor.call(1, m, "b", lambda y: [tf.reduce_sum(y) * second], [y])
                z = z / tf.cast(rows[m] > 0, z.dtype)  # without rows: infinite gradients
                penalty = tf.reduce_sum(first**2)
            gradients.append(tape.gradient([z, penalty], variables))
        own_rows = [rows[m] for m in range(NUM_MICROBATCHES)]
        sums = sum_gradients(executor, gradients, own_rows, functions={})
        executor.order(tf.compat.v1.get_default_graph())
        devices.extend(g.device for g in sums)
        return [tf.convert_to_tensor(g) for g in sums]

    devices: list[str] = []
    sums = step(tf.constant([4, 0, 2]))
    # Microbatches 0 and 2: x is 1 and 3. The penalty counts once for each of them.
    np.testing.assert_allclose(sums[0], 3.0 * (1 + 3) + 2 * 2 * np.array([1.0, 2.0]))
    np.testing.assert_allclose(sums[2], (1 + 2) * 1 + 2 + (1 + 2) * 3 + 2)
    assert devices == [DEVICES[0], DEVICES[0], DEVICES[1]]


def test_pipelines_are_added_up_in_their_order_where_they_are_told_to():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(3, 2, 1000)).astype("float32")  # of three pipelines two gradients
    table = rng.normal(size=(3, 2)).astype("float32")
    functions, devices = {}, []

    @tf.function(autograph=False)
    def step(dense, table):
        sums = []
        for of_pipeline, values in zip(tf.unstack(dense), tf.unstack(table), strict=True):
            with tf.device(DEVICES[0]):
                first, second = (tf.identity(each) for each in tf.unstack(of_pipeline))
                rows = tf.IndexedSlices(values[None], tf.constant([1], tf.int64), [4, 2])
            sums.append([first, rows, second])
        totals = sum_over_pipelines(sums, [None, None, DEVICES[1]], functions)
        devices.extend(total.device for total in totals)
        return [tf.convert_to_tensor(total) for total in totals]

    first, rows, second = step(dense, table)
    np.testing.assert_array_equal(first, (dense[0, 0] + dense[1, 0]) + dense[2, 0])
    np.testing.assert_array_equal(second, (dense[0, 1] + dense[1, 1]) + dense[2, 1])
    np.testing.assert_allclose(rows[1], table.sum(0), rtol=1e-6)
    assert devices == [DEVICES[0], DEVICES[0], DEVICES[1]]
    assert len(functions) == 1  # of both additions, on both devices


def test_pipelines_are_added_up_by_what_adds_up_microbatches():
    """Also where that asks whether a microbatch has rows."""
    functions = {}

    @tf.function(autograph=False)
    def step(rows):
        executor = Executor(build_schedule("gpipe", 1, 2), DEVICES[:1])
        with tf.device(DEVICES[0]):
            gradients = [[tf.fill([3], float(m + 1))] for m in range(2)]
        of_microbatches = sum_gradients(executor, gradients, [rows[0], rows[1]], functions)
        before = len(functions)
        totals = sum_over_pipelines([of_microbatches] * 4, None, functions)
        assert len(functions) == before
        return totals

    np.testing.assert_array_equal(step(tf.constant([2, 2]))[0], [12.0] * 3)
    np.testing.assert_array_equal(step(tf.constant([2, 0]))[0], [4.0] * 3)
