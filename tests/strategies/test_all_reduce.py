"""`ReplicaContext.all_reduce`: gradients of any order, and a trace as long as the model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import op_selector

from tfparallel import MirroredStrategy

pytestmark = pytest.mark.turns

DEVICES = ["CPU:0", "CPU:1"]
ROWS, CHANNELS = 7, 3


def _replica() -> int:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def _run(strategy, step, in_function: bool) -> list[np.ndarray]:
    """What both replicas return."""
    run = tf.function(strategy.run) if in_function else strategy.run
    return [np.asarray(each) for each in strategy.experimental_local_results(run(step))]


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("reduce_op, count", [("SUM", 1), ("MEAN", 2)])
def test_first_and_second_gradients(reduce_op, count, in_function):
    def step():
        context, number = tf.distribute.get_replica_context(), tf.cast(_replica(), tf.float64)
        x, factor = 1 + number, 1 + 2 * number
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = context.all_reduce(reduce_op, x * x)
                loss = factor * y * y
            first = inner.gradient(loss, x)
        return tf.stack([first, outer.gradient(first, x)])

    # y = sum(x^2) / n; losses sum to 4 y^2; x = 1, 2; n replicas average, or 1 for a sum
    y = 5 / count
    expected = [[16 * y * x / count, 16 / count * (y + 2 * x * 3 / count)] for x in (1.0, 2.0)]
    received = _run(MirroredStrategy(DEVICES), step, in_function)
    np.testing.assert_allclose(received, expected, rtol=1e-12)


def _gradient_of_penalty(layer, x, mask):
    """Of a penalty on gradients, as Wasserstein GANs have one."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(layer(x, training=True, mask=mask) ** 3)
        gradient = inner.gradient(loss, x)
        penalty = tf.reduce_sum(gradient**2)
    return tf.concat([gradient, outer.gradient(penalty, x)], 1)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_batch_norm_of_replicas_has_the_gradients_of_one_device(masked, in_function):
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(3, 2, (ROWS, 4, CHANNELS)))
    mask = tf.constant(rng.random((ROWS, 4)) < 0.6) if masked else None

    def layer():
        return keras.layers.BatchNormalization(synchronized=True, dtype="float64")

    expected = _gradient_of_penalty(layer(), x, mask)
    strategy = MirroredStrategy(DEVICES)
    with strategy.scope():
        replicated = layer()
        replicated.build(x.shape)

    def step():
        rows = slice(4 * _replica(), 4 + 3 * _replica())  # four, and the other three
        return _gradient_of_penalty(replicated, x[rows], None if mask is None else mask[rows])

    received = np.concatenate(_run(strategy, step, in_function))
    np.testing.assert_allclose(received, expected, atol=1e-10)


def _traced(num_layers: int, monkeypatch) -> tuple[int, int]:
    """All-reduces of one training step, and operations that `tf.custom_gradient` looks at."""
    strategy, walked, reduced = MirroredStrategy(DEVICES), [], []
    with strategy.scope():
        norms = [keras.layers.BatchNormalization(synchronized=True) for _ in range(num_layers)]
        for norm in norms:
            norm.build((None, CHANNELS))
    walk, reduce = op_selector.get_backward_walk_ops, strategy.extended.batch_reduce_to

    def counted_walk(*args, **kwargs):
        found = walk(*args, **kwargs)
        walked.append(len(found))
        return found

    def counted_reduce(*args):
        reduced.append(args)
        return reduce(*args)

    monkeypatch.setattr(op_selector, "get_backward_walk_ops", counted_walk)
    monkeypatch.setattr(strategy.extended, "batch_reduce_to", counted_reduce)

    def step():
        x = tf.ones([ROWS, CHANNELS])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for norm in norms:
                y = norm(y, training=True)
        return tape.gradient(y, x)

    tf.function(lambda: strategy.run(step)).get_concrete_function()
    return len(reduced), sum(walked)


def test_a_layer_has_one_all_reduce_forward_and_one_backward(monkeypatch):
    assert _traced(3, monkeypatch)[0] == 6


def test_the_trace_is_as_long_as_the_model(monkeypatch):
    few, many = (_traced(layers, monkeypatch)[1] for layers in (2, 8))
    assert many == 4 * few
