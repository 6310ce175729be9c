"""The executor runs each device's passes in the schedule's order, traced once."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.pipeline.action import Action
from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.schedule import Schedule
from tfparallel.pipeline.schedules.registry import build_schedule

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4)]


class Recorded:
    """A chain of `x * weight`, one for each stage, whose passes are noted as they really run.

    A pass is told by the values that it is given: microbatch m is a tensor of `m + 1`.
    """

    def __init__(self, num_stages: int):
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

        def compute(x, microbatch):
            self.num_traces += 1
            return [passes(x * self.weights[stage], microbatch), tf.identity(microbatch)]

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


def test_a_stage_is_traced_once_for_all_microbatches():
    recorded = Recorded(2)
    recorded.run(build_schedule("1f1b", 2, 8))
    assert recorded.num_traces == 2


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
