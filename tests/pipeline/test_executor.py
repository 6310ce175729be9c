"""The executor runs each device's passes in the schedule's order, traced once."""

import collections
import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.schedules.registry import build_schedule

pytestmark = pytest.mark.turns

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4)]


class Recorded:
    """A chain of `x * weight`, one for each stage, whose passes are noted as they really run.

    A pass is told by the values that it is given: microbatch m is a tensor of `m + 1`.
    """

    def __init__(self, num_stages: int, notes_weights: bool = False):
        self.notes_weights = notes_weights
        self.passes: dict[int, list[tuple]] = collections.defaultdict(list)
        self.num_traces = 0
        self.weights = []
        for stage in range(num_stages):
            with tf.device(DEVICES[stage % len(DEVICES)]):
                self.weights.append(tf.Variable(1.0))

    def computation(self, stage: int):
        def note(kind, microbatch, value):
            self.passes[stage].append((stage, int(microbatch), kind))
            return value

        @tf.custom_gradient
        def passes(x, microbatch):
            def backward(gradient):
                return noted("backward", microbatch, gradient), None

            return noted("forward", microbatch, x), backward

        def noted(kind, microbatch, x):
            y = tf.numpy_function(lambda m, v: note(kind, m, v), [microbatch, x], x.dtype)
            return tf.ensure_shape(y, x.shape)

        @tf.custom_gradient
        def multiply(x, weight, microbatch):
            def backward(gradient):
                of_input = noted("backward_input", microbatch, gradient * weight)
                of_weight = noted("backward_weight", microbatch, gradient * x)
                return of_input, tf.reduce_sum(of_weight), None

            return noted("forward", microbatch, x * weight), backward

        def compute(x, microbatch):
            self.num_traces += 1
            weight = self.weights[stage]
            if self.notes_weights:
                return [multiply(x, tf.identity(weight), microbatch), tf.identity(microbatch)]
            return [passes(x * weight, microbatch), tf.identity(microbatch)]

        return compute

    def run(self, schedule: Schedule) -> list[np.ndarray]:
        """One step; gives the gradient of the summed squares."""

        @tf.function
        def step():
            executor = Executor(schedule, DEVICES[: schedule.num_devices])
            losses = []
            with tf.GradientTape() as tape:
                for microbatch in range(schedule.num_microbatches):
                    x, number = tf.fill([2], float(microbatch + 1)), tf.constant(microbatch)
                    for stage in range(schedule.num_stages):
                        computation = self.computation(stage)
                        x, number = executor.call(
                            stage, microbatch, "chain", computation, [x, number]
                        )
                    losses.append(tf.reduce_sum(x**2))
            gradients = tape.gradient(losses, self.weights)
            executor.order(tf.compat.v1.get_default_graph())
            return gradients

        return [gradient.numpy() for gradient in step()]


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_every_device_follows_the_schedule(name, num_microbatches):
    schedule = build_schedule(name, 3, num_microbatches)
    recorded = Recorded(schedule.num_stages)
    gradients = recorded.run(schedule)
    expected = 2 * 2 * sum((m + 1) ** 2 for m in range(num_microbatches))
    np.testing.assert_allclose(gradients, [expected] * schedule.num_stages, rtol=1e-5)
    for stage, passes in recorded.passes.items():
        order = schedule.orders[schedule.device_of[stage]]
        assert [Action(*each) for each in passes] == [a for a in order if a.stage == stage]
    assert len(recorded.passes) == schedule.num_stages


@pytest.mark.parametrize("num_microbatches", [1, 5])
def test_halves_of_backward_passes_follow_the_schedule(num_microbatches):
    schedule = build_schedule("zero_bubble", 3, num_microbatches)
    recorded = Recorded(3, notes_weights=True)
    gradients = recorded.run(schedule)
    expected = 2 * 2 * sum((m + 1) ** 2 for m in range(num_microbatches))
    np.testing.assert_allclose(gradients, [expected] * 3, rtol=1e-5)
    for stage, passes in recorded.passes.items():
        order = list(schedule.orders[stage])
        if stage == 0:  # nothing wants the gradient of the data
            order = [action for action in order if action.kind != "backward_input"]
            passes = [each for each in passes if each[2] != "backward_input"]
        assert [Action(*each) for each in passes] == order


def test_a_stage_is_traced_once_for_all_microbatches():
    recorded = Recorded(2)
    recorded.run(build_schedule("1f1b", 2, 8))
    assert recorded.num_traces == 2


def test_what_tensorflow_optimises_does_not_grow_with_microbatches():
    """A stage's operations are in two functions; the step holds a call for each pass."""

    def functions_and_calls(num_microbatches):
        schedule = build_schedule("1f1b", 2, num_microbatches)
        weights = []
        for device in DEVICES[:2]:
            with tf.device(device):
                weights.append(tf.Variable(1.0))

        @tf.function(autograph=False)
        def step():
            executor = Executor(schedule, DEVICES[:2])
            losses = []
            with tf.GradientTape() as tape:
                for m in range(num_microbatches):
                    x = tf.ones([2])
                    for stage, weight in enumerate(weights):
                        (x,) = executor.call(stage, m, "chain", lambda x, w=weight: [x * w], [x])
                    losses.append(tf.reduce_sum(x))
            gradients = tape.gradient(losses, weights)
            executor.order(tf.compat.v1.get_default_graph())
            return gradients

        definition = step.get_concrete_function().graph.as_graph_def()
        sizes = [len(function.node_def) for function in definition.library.function]
        return sizes, [node.op for node in definition.node].count("RemoteCall")

    few, few_calls = functions_and_calls(2)
    many, many_calls = functions_and_calls(8)
    assert sorted(few) == sorted(many)
    assert (few_calls, many_calls) == (2 * 2 * 2, 2 * 2 * 8)


@pytest.mark.parametrize("inner", [False, True], ids=["persistent", "nested"])
def test_gradients_of_gradients_are_right(inner):
    weight = tf.Variable(3.0)

    @tf.function(autograph=False)
    def step(x):
        executor = Executor(build_schedule("1f1b", 1, 1), DEVICES[:1])
        with tf.GradientTape(persistent=not inner) as outer:
            outer.watch(x)
            with tf.GradientTape() if inner else contextlib.nullcontext(outer) as tape:
                tape.watch(x)
                (y,) = executor.call(0, 0, "cube", lambda x: [weight * x**3], [x])
            first = tape.gradient(y, x)
        second = outer.gradient(first, x)
        executor.order(tf.compat.v1.get_default_graph())
        return first, second

    first, second = step(tf.constant(2.0))
    assert (first.numpy(), second.numpy()) == (3 * 3 * 4, 3 * 6 * 2)


@pytest.mark.parametrize(("name", "most"), [("1f1b", [3, 2, 1]), ("gpipe", [8, 8, 8])])
def test_live_microbatches_are_as_many_as_the_schedule_allows(name, most):
    recorded = Recorded(3)
    recorded.run(build_schedule(name, 3, 8))
    for stage, passes in recorded.passes.items():
        live = np.cumsum([1 if kind == "forward" else -1 for _, _, kind in passes])
        assert max(live) == most[stage]


def test_a_schedule_of_ones_own_is_carried_out():
    """Stage 1 runs microbatch 1 first; nobody but a schedule would."""
    schedule = Schedule(
        "swapped",
        [
            [(0, 1, "forward"), (0, 0, "forward"), (0, 1, "backward"), (0, 0, "backward")],
            [(1, 1, "forward"), (1, 0, "forward"), (1, 0, "backward"), (1, 1, "backward")],
        ],
    )
    recorded = Recorded(2)
    recorded.run(schedule)
    for stage in (0, 1):
        assert tuple(Action(*each) for each in recorded.passes[stage]) == schedule.orders[stage]
