"""What functions compute from sizes is in the host's memory on GPUs, and the same numbers."""

import pytest
import tensorflow as tf

from tests.gpu.audit import audit
from tfparallel.segments.graph_copy import GraphFunction

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:1"
X = tf.random.stateless_normal([3, 2, 5], [1, 2]).numpy()
TOKENS = tf.constant([4, 5, 6], tf.int64)


def means(x, tokens):
    """Gradients of means over some axes, products of sizes, sizes that are picked."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        rows = tf.reshape(x * x, [tf.math.reduce_prod(tf.shape(x)[:2]), 5])
        mean = tf.reduce_mean(rows, -1)
        sums = tf.reduce_sum(x, [0, -1]) ** 2.0 + tf.reduce_mean(x, [1, 2], keepdims=True)
        loss = tf.reduce_sum(mean) + tf.reduce_sum(sums)
    halves = tf.reshape(x, tf.concat([tf.gather(tf.shape(x), [2, 0]), [2]], 0))
    picked = tf.gather(tf.cast(tokens, tf.int32), tf.range(tf.shape(x)[0]))
    return [tape.gradient(loss, x), halves, tf.cast(picked, tf.int64)]


def products(x, tokens):
    """As of a Dense layer for sequences."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tensordot(x, X.reshape([5, 6]), 1)
        loss = tf.reduce_mean(tf.tensordot(y, x, [[0, 1], [0, 1]]), 0)
    return [y, tape.gradient(loss, x), tokens]


def nothing(x, tokens):
    """Products of no sizes, and none that are put together."""
    none = tf.shape(x)[3:]
    rows = tf.reshape(x, [tf.math.reduce_prod(none), -1])
    stitched = tf.dynamic_stitch([tf.zeros([0], tf.int32)], [none])
    return [rows, tf.reshape(tokens, tf.concat([stitched, [-1]], 0))]


def _step(computation, shape=(None, None, 5)):
    """The computation, traced twice, as a step which calls it as a function on a device."""
    specs = tf.TensorSpec(shape), tf.TensorSpec([shape[0]], tf.int64)
    graph = tf.function(computation, autograph=False).get_concrete_function(*specs).graph
    before = graph.as_graph_def()
    function = GraphFunction("computation", graph, graph.inputs, graph.outputs)
    step = tf.function(lambda x, tokens: function(DEVICE, [x, tokens]), autograph=False)
    return step.get_concrete_function(*specs), before, graph.as_graph_def()


@pytest.mark.parametrize("computation", [means, products, nothing])
def test_a_call_sends_the_host_nothing_of_sizes(computation):
    found = audit(_step(computation)[0].graph)
    assert not found.faults()
    assert not found.copies["to_host"]


@pytest.mark.parametrize("computation", [means, products, nothing])
def test_numbers_are_the_same(computation):
    ours = _step(computation)[0](X, TOKENS)
    plain = tf.function(computation, autograph=False).get_concrete_function(
        tf.TensorSpec([None, None, 5]), tf.TensorSpec([None], tf.int64)
    )(X, TOKENS)
    for own, other in zip(ours, plain, strict=True):
        tf.debugging.assert_equal(own, other)


@pytest.mark.parametrize("computation", [means, products, nothing])
def test_nothing_changes_where_sizes_are_known(computation):
    _, before, after = _step(computation, (3, 2, 5))
    assert before == after
