"""When each pass of a step starts and ends: operations around it that read the clock."""

from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from tfparallel.internals import run_independently
from tfparallel.internals.graphs import run_after
from tfparallel.pipeline.plans.action import Action


def add_clock(
    graph: tf.Graph, calls: Mapping[Action, Sequence[tf.Operation]], hosts: Mapping[int, str]
) -> dict[Action, tf.Tensor]:
    """Lets every pass wait for the clock, which waits for all that the pass waits for.

    Args:
        graph: of the step, all of whose control dependencies are there.
        calls: of each pass.
        hosts: for each stage a CPU of its device's machine.

    Returns:
        For each pass `[2]` float64: seconds of its start and of its end.
    """
    passes = {action: operations for action, operations in calls.items() if operations}
    ends = {
        action: _time_after(operations, graph, hosts[action.stage])
        for action, operations in passes.items()
    }
    end_of = {operation: ends[action].op for action, own in passes.items() for operation in own}
    times = {}
    for action, operations in passes.items():
        needed = {tensor.op for operation in operations for tensor in operation.inputs}
        needed |= {each for operation in operations for each in operation.control_inputs}
        needed -= set(operations)
        needed |= {end_of[each] for each in needed if each in end_of}  # read before what follows
        start = _time_after(needed, graph, hosts[action.stage])
        run_after(operations[0], start.op)
        run_independently(graph, [start.op, ends[action].op])
        with graph.as_default(), tf.device(hosts[action.stage]):
            times[action] = tf.stack([start, ends[action]])
    return times


def _time_after(operations: Iterable[tf.Operation], graph: tf.Graph, host: str) -> tf.Tensor:
    with graph.as_default(), tf.device(host), tf.control_dependencies(list(operations)):
        return tf.timestamp()
