"""What is computed from sizes is on the host, on GPUs (see tests/gpu), and nothing else."""

from unittest import mock

import pytest
import tensorflow as tf

from tfparallel.internals import keras_integers
from tfparallel.replicas.sizes_on_hosts import sizes_on_hosts

HOST, DEVICE = (f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(2))


@tf.function(autograph=False)
def means(x, tokens):
    with sizes_on_hosts([DEVICE]), tf.device(DEVICE), tf.GradientTape() as tape:
        tape.watch(x)
        rows = tf.reshape(x, [tf.math.reduce_prod(tf.shape(x)[:2]), 3])
        picked = tf.gather(tokens * 2, tf.range(tf.shape(x)[0]), name="picked")
        mean = tf.reduce_mean(tf.reduce_mean(rows, 1))
        return tape.gradient(mean, x), picked


def traced(has_gpu):
    with mock.patch.object(keras_integers, "has_gpu", return_value=has_gpu):
        specs = tf.TensorSpec([None, None, 3]), tf.TensorSpec([None], tf.int32)
        return tf.function(means.python_function).get_concrete_function(*specs)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_sizes_are_on_the_host_of_a_gpu(has_gpu):
    graph = traced(has_gpu).graph
    made = [op for op in graph.get_operations() if op.type in ("DynamicStitch", "Prod")]
    assert {op.type for op in made} == {"DynamicStitch", "Prod"}
    assert {op.device for op in made} == {HOST if has_gpu else DEVICE}
    assert graph.get_operation_by_name("picked").device == DEVICE  # tokens, of the batch


def test_numbers_are_the_same():
    x, tokens = tf.random.stateless_normal([3, 2, 3], [1, 2]), tf.constant([4, 5, 6])
    for ours, plain in zip(traced(True)(x, tokens), traced(False)(x, tokens), strict=True):
        tf.debugging.assert_equal(ours, plain)
