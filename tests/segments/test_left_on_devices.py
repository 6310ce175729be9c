"""Tensors that functions leave where they are made: what comes back, and when the memory does."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.segments.left_on_devices import LeftOnDevices
from tfparallel.segments.segment_function import StageFunction, inference_function

FIRST = "/job:localhost/replica:0/task:0/device:CPU:0"
OTHER = FIRST.replace("CPU:0", "CPU:1")
ROWS = tf.constant([[1.0, 2.0], [-3.0, 0.5], [2.0, 2.0]])


@pytest.fixture
def on_both():
    """A computation with weights on another device, and these."""
    with tf.device(OTHER):
        up, down = tf.Variable([[0.5, -1.0], [0.25, 1.5]]), tf.Variable([[0.5, 2.0], [-1.0, 0.1]])

    def compute(x):
        with tf.device(OTHER):
            hidden = tf.nn.sigmoid(tf.nn.sigmoid(x @ up) @ down)
        with tf.device(FIRST):
            return [tf.tanh(hidden)]

    return compute, [up, down]


def _stage(compute, x, recomputes=lambda operation: False):
    with tf.device(FIRST):
        concrete = tf.function(compute).get_concrete_function(x)
    function = StageFunction("stage", concrete, [False, True, True], recomputes, left_on={OTHER})
    return concrete, function, [x, *concrete.captured_inputs]


def _gradients(compute, weights):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(compute(ROWS)[0] ** 2)
    return tape.gradient(loss, weights)


@pytest.mark.parametrize("passes", ["backward", "backward_halves"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_what_another_device_makes_stays_there_for_its_gradient(on_both, recomputes, passes):
    @tf.function
    def step(x):
        _, function, arguments = _stage(on_both[0], x, lambda operation: recomputes)
        (y,), stash = function.forward(FIRST, arguments)
        gradients, _ = getattr(function, passes)(FIRST, arguments, stash, [2 * y])
        assert [gradient.device for gradient in gradients[1:]] == [OTHER, OTHER]
        return gradients[1:]

    for ours, theirs in zip(step(ROWS), _gradients(*on_both), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("passes", [None, "backward", "backward_halves"])
def test_what_stays_ends_with_the_backward_pass(on_both, passes):
    @tf.function
    def read_behind(x):
        _, function, arguments = _stage(on_both[0], x)
        (y,), stash = function.forward(FIRST, arguments)
        behind = [y]
        if passes is not None:
            gradients, _ = getattr(function, passes)(FIRST, arguments, stash, [2 * y])
            behind = gradients[1:]
        *_, written, handle = stash
        with tf.control_dependencies(behind), tf.device(OTHER):
            return tf.raw_ops.TensorArrayReadV3(
                handle=handle, index=0, flow_in=written, dtype=tf.float32
            )

    if passes is None:
        assert read_behind(ROWS).shape == (3, 2)
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="has already been closed"):
            read_behind(ROWS)


def test_what_is_read_once_takes_no_memory_then():
    @tf.function
    def step(x):
        with tf.device(OTHER):
            tensors = [x + 1.0, tf.shape(x)]
        left = LeftOnDevices(tensors, {OTHER}, are_read_once=True)
        assert left.others == [1]
        arrays = left.new_arrays({})
        read = left.read(arrays, left.write(arrays, tensors))
        with tf.control_dependencies([read[0]]):
            return left.read(arrays, [tf.constant(0.0)])

    with pytest.raises(tf.errors.InvalidArgumentError, match="cleared after a previous read"):
        step(ROWS)


def test_a_computation_may_be_used_again(on_both):
    """Its graph has what one function writes, for arrays that another is not given."""

    @tf.function
    def step(x):
        concrete, kept, arguments = _stage(on_both[0], x)
        again = StageFunction(
            "again", concrete, [False, True, True], lambda operation: True, left_on={OTHER}
        )
        gradients = []
        for function in (kept, again):
            (y,), stash = function.forward(FIRST, arguments)
            gradients += function.backward(FIRST, arguments, stash, [2 * y])[0][1:]
        return gradients, inference_function("inference", concrete)(FIRST, arguments)

    gradients, (y,) = step(ROWS)
    for ours, theirs in zip(gradients, 2 * _gradients(*on_both), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(y, on_both[0](ROWS)[0], rtol=1e-6)
