"""What the chief has given up changes nothing on a server any more."""

import threading

import pytest
import tensorflow as tf

from tfparallel.parameter_server.fence import Fence
from tfparallel.parameter_server.variable_copies import VariableCopies, changed_by

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture
def fence():
    return Fence([DEVICE])


class SlowStep:
    """Adds 1 to a variable in a step that waits until it may go on."""

    def __init__(self, fence):
        self.began, self.may_go_on = threading.Event(), threading.Event()
        with tf.device(DEVICE):
            self.variable, self.other = tf.Variable(0.0), tf.Variable(10.0)

        @tf.function
        def step(generation):
            one = tf.numpy_function(self._wait, [self.variable.read_value()], tf.float32)
            self.variable.assign_add(tf.ensure_shape(one, []) * self.other / 10)
            fence.guard(tf.compat.v1.get_default_graph(), generation)

        self.step = step

    def _wait(self, value):
        self.began.set()
        assert self.may_go_on.wait(30)
        return value * 0 + 1


def test_waits_for_what_still_runs_and_lets_nothing_begin_later(fence):
    slow = SlowStep(fence)
    given_up = fence.generation
    running = threading.Thread(target=slow.step, args=(given_up,))
    running.start()
    assert slow.began.wait(30)
    values = []

    def raise_generation():
        fence.raise_generation()
        values.append(slow.variable.numpy())

    raising = threading.Thread(target=raise_generation)
    raising.start()
    raising.join(0.3)
    assert raising.is_alive()  # the step holds the lock
    slow.may_go_on.set()
    for thread in (running, raising):
        thread.join(30)
    assert values == [1.0]

    with pytest.raises(tf.errors.InvalidArgumentError, match="given up by the chief"):
        slow.step(given_up)
    assert slow.variable.numpy() == 1.0
    slow.step(fence.generation)
    assert slow.variable.numpy() == 2.0


def test_a_step_that_fails_lets_go(fence):
    with tf.device(DEVICE):
        variable = tf.Variable(0.0)

    @tf.function
    def step(generation):
        with tf.control_dependencies([variable.assign_add(1.0)]):
            tf.debugging.Assert(False, ["no"])
        fence.guard(tf.compat.v1.get_default_graph(), generation)

    with pytest.raises(tf.errors.InvalidArgumentError, match="no"):
        step(fence.generation)
    fence.raise_generation()


def test_goes_back_to_what_was_copied_of_what_a_step_changes(fence):
    slow = SlowStep(fence)
    slow.may_go_on.set()
    graph = slow.step.get_concrete_function(tf.TensorSpec((), tf.int64)).graph
    (handle,) = changed_by(graph)
    assert handle is slow.variable.handle  # `other` is only read
    copies = VariableCopies(fence)
    copies.take()  # of nothing: predictions change nothing
    assert copies.cover([handle]) and not copies.cover([handle])
    copies.take()
    slow.step(fence.generation)
    assert slow.variable.numpy() == 1.0
    copies.restore()
    assert slow.variable.numpy() == 0.0


def test_copies_of_many_variables_come_back_to_each(fence):
    with tf.device(DEVICE):
        variables = [tf.Variable(float(i)) for i in range(70)]
    copies = VariableCopies(fence)
    copies.cover([variable.handle for variable in variables])
    copies.take()
    for variable in variables:
        variable.assign(-1.0)
    copies.restore()
    assert [float(variable) for variable in variables] == list(range(70))
    graph = copies._restore.get_concrete_function(fence.generation).graph
    reads = [op for op in graph.get_operations() if op.type == "OptionalGetValue"]
    assert [len(op.outputs) for op in reads] == [32, 32, 6]
