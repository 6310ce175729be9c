"""What of a reduction a step waits for: sums that sleep, beside gradients that sleep."""

import time

import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from tfparallel.communication.exposed_wait import ExposedWait
from tfparallel.communication.link_times import LinkTimes

LONG_S, HIDDEN_S, LAST_S = 0.8, 0.4, 0.2


def sleeping(tensor, seconds):
    """The same tensor, so much later; on a thread of its own, as collectives are."""

    def pause(value):
        time.sleep(seconds)
        return value

    return tf.ensure_shape(tf.numpy_function(pause, [tensor], tensor.dtype), tensor.shape)


def exposed_by(step):
    """Seconds of one step, after one that traces, and how long it took by another clock."""
    wait = ExposedWait("/device:CPU:0")
    function = tf.function(lambda: step(wait))
    function()
    before_s, began_s = wait.seconds, time.perf_counter()
    function()
    return wait.seconds - before_s, time.perf_counter() - began_s


def test_what_travels_while_gradients_are_computed_is_hidden():
    """The second gradient takes longer than the first one's sum, which sleeps beside it."""

    def step(wait):
        # Of variables' values, or they would be constants that are computed once.
        first, second = tf.random.uniform([2]), sleeping(tf.random.uniform([2]), LONG_S)
        began = wait.begin([first, second])
        sums = [sleeping(first, HIDDEN_S), sleeping(second, LAST_S)]
        wait.end(began, sums)
        return sums

    exposed_s, took_s = exposed_by(step)
    assert LAST_S <= exposed_s <= took_s - LONG_S + 0.01


def test_what_waits_for_nothing_else_is_exposed():
    def step(wait):
        gradients = [tf.random.uniform([2])]
        began = wait.begin(gradients)
        sums = [sleeping(gradients[0], HIDDEN_S)]
        wait.end(began, sums)
        return sums

    exposed_s, took_s = exposed_by(step)
    assert HIDDEN_S <= exposed_s <= took_s


def test_of_a_gpu_nothing_is_told():
    """The host has asked for its operations long before they run."""
    wait = ExposedWait("/job:worker/task:0/device:GPU:0")
    assert wait.begin([tf.zeros(1)]) is None
    wait.end(None, [tf.zeros(1)])
    assert wait.seconds == 0.0


@pytest.mark.parametrize(("hidden_s", "stalled_s"), [(0.0, 5.0), (3.0, 2.0), (-1.0, 6.0), (9.0, 0)])
def test_steps_are_held_up_by_what_is_not_hidden(hidden_s, stalled_s):
    times = LinkTimes(7.0, 1.0, 100, 4.0).since(LinkTimes(2.0, 1.0, 50, 4.0 - hidden_s))
    assert times.stalled_s == stalled_s


def test_there_is_no_clock_where_operations_shall_be_deterministic():
    """TensorFlow refuses one then, which ended each training of several workers."""
    tf.config.experimental.enable_op_determinism()
    try:
        wait = ExposedWait("/device:CPU:0")
        wait.end(wait.begin([tf.ones(3)]), [tf.ones(3)])
    finally:
        config.disable_op_determinism()
    assert wait.seconds == 0.0
