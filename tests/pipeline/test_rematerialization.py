"""Which microbatches' activations are computed again, and where the others wait."""

import pytest
import tensorflow as tf

from tests.graphs import waited_for
from tests.pipeline.test_executor import DEVICES
from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.plans.schedules.registry import build_schedule
from tfparallel.pipeline.rematerialization import Rematerialization


@pytest.mark.parametrize(
    ("name", "kept"),
    [("gpipe", {(0, 3), (1, 3), (2, 3)}), ("1f1b", {(2, m) for m in range(4)})],
)
def test_what_would_be_computed_again_at_once_is_kept(name, kept):
    """torchgpipe's last microbatch; under 1F1B, the last stage."""
    schedule = build_schedule(name, 3, 4)
    pairs = {(stage, microbatch) for stage in range(3) for microbatch in range(4)}
    for choice, expected in {"none": pairs, "full": set(), "except_last": kept}.items():
        chosen = Rematerialization(choice, schedule)
        assert {pair for pair in pairs if not chosen.is_done(*pair)} == expected


def traced_step(schedule=None, **options):
    schedule = schedule or build_schedule("1f1b", 2, 3)
    weights = []
    for device in DEVICES[1:3]:
        with tf.device(device):
            weights.append(tf.Variable(tf.ones([5, 5])))

    @tf.function(autograph=False)
    def step():
        executor = Executor(schedule, DEVICES[1:3], **options)
        losses = []
        with tf.GradientTape() as tape:
            for m in range(schedule.num_microbatches):
                x = tf.ones([2, 5]) * float(m + 1)
                for stage, weight in enumerate(weights):

                    def layer(x, weight=weight):
                        return [tf.tanh(x @ weight)]

                    (x,) = executor.call(stage, m, "layer", layer, [x])
                losses.append(tf.reduce_sum(x))
        gradients = tape.gradient(losses, weights)
        executor.order(tf.compat.v1.get_default_graph())
        return gradients

    return step


def test_what_is_kept_waits_on_the_host_until_its_backward_pass_is_next():
    hosts = [DEVICES[0]] * 2
    step = traced_step(hosts=hosts)
    operations = step.get_concrete_function().graph.get_operations()
    moved = [op for op in operations if op.name.startswith("offload")]
    fetched = [op for op in operations if op.name.startswith("fetch")]
    assert len(moved) == len(fetched) == 2 * 3  # stages and microbatches
    assert {op.device for op in moved} == {DEVICES[0]}
    assert {op.device for op in fetched} == set(DEVICES[1:3])
    for operation in fetched:
        released = operation.inputs[0].op  # on the host: what it sends comes back, and not before
        assert released.device == DEVICES[0] and released.inputs[0].op in moved
        (consumer,) = operation.outputs[0].consumers()
        assert consumer.device == operation.device and "backward" in consumer.name
        # The pass before last of this device, or it would all come back at once. The last stage's
        # first backward pass has only its forward pass before it, which made what is fetched.
        waits = [op for op in released.control_inputs if op.device == operation.device]
        is_first = consumer.device == DEVICES[2] and not waits
        assert is_first or all(op.type == "RemoteCall" for op in waits)
    assert sum(not op.inputs[0].op.control_inputs for op in fetched) == 1
    for ours, theirs in zip(step(), traced_step()()):
        tf.debugging.assert_equal(ours, theirs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_a_device_keeps_two_passes_at_most_until_they_are_on_the_host(name):
    """It may be asynchronous: each forward pass is behind the copies of all but the one before."""
    num_microbatches = 6
    schedule = build_schedule(name, 2, num_microbatches)
    step = traced_step(schedule, hosts=[DEVICES[0]] * 2)
    graph = step.get_concrete_function().graph
    behind = waited_for(graph)
    for device, actions in zip(DEVICES[1:3], schedule.orders):
        copies = [op for op in graph.get_operations() if op.name.startswith("offload")]
        made_by = {copy.inputs[0].op: copy for copy in copies}
        forward = [op for op in graph.get_operations() if op in made_by and op.device == device]
        assert len(forward) == num_microbatches  # traced in this order
        order = [a.microbatch if a.kind == "forward" else None for a in actions]
        for place, microbatch in enumerate(order):
            if microbatch is None:
                continue
            earlier = {made_by[forward[m]] for m in order[: max(place - 1, 0)] if m is not None}
            assert earlier <= behind[forward[microbatch]]
            if place and order[place - 1] is not None:  # this one is copied meanwhile
                assert made_by[forward[order[place - 1]]] not in behind[forward[microbatch]]
    for ours, theirs in zip(step(), traced_step(schedule)()):
        tf.debugging.assert_equal(ours, theirs)
