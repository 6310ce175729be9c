"""Control dependencies that put the calls on each device into the order of a schedule."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from tfparallel.internals import run_independently
from tfparallel.internals.graphs import run_after
from tfparallel.pipeline.between_passes import place_shapes
from tfparallel.pipeline.clustering import hide_from_clustering
from tfparallel.pipeline.cycles import has_cycle
from tfparallel.pipeline.passes import Pass, Passes
from tfparallel.pipeline.plans.schedule import Schedule


def put_in_order(
    graph: tf.Graph, schedule: Schedule, pipelines: Sequence[tuple[Passes, Sequence[str]]]
) -> Schedule:
    """Makes each device's calls follow one another as the schedule says.

    Args:
        graph: of the step.
        pipelines: of each its passes, and the devices of its stages.

    Returns:
        The schedule; or, where something of the step depends on several microbatches, that with
        all forward passes first, even if one call after another is done for all microbatches.

    Raises:
        ValueError: if the step cannot be done in that order either.
    """
    each = [passes for passes, _ in pipelines]
    for passes in each:
        unordered = [
            op
            for op, action in passes.action_of.items()
            if action.kind != "forward" or all(x.dtype != tf.resource for x in op.inputs)
        ]
        run_independently(graph, [*unordered, *itertools.chain(*passes.sums.values())])
    place_shapes(graph)
    edges = _edges_of_all(_edges, schedule, each)
    if has_cycle(graph, edges):
        schedule = schedule.all_forward_first()
        edges = _edges_of_all(_edges, schedule, each)
        if has_cycle(graph, edges):
            edges = _edges_of_all(_call_by_call, schedule, each)
    for before, after in edges:
        run_after(after, before)
    for passes, devices in pipelines:
        hide_from_clustering(graph, passes, devices)
    if has_cycle(graph):
        raise ValueError(
            "A step of a pipeline makes the same calls for every microbatch, in the same order. "
            "Received: calls that wait for one another in a circle, as those of microbatches that "
            "differ from one another may. Make the step the same for all replicas, or train in a "
            "strategy that does not cut the model."
        )
    return schedule


def _edges_of_all(
    edges: Callable, schedule: Schedule, each: Iterable[Passes]
) -> list[tuple[tf.Operation, tf.Operation]]:
    """What one of the functions below gives, of all pipelines."""
    return [edge for passes in each for edge in edges(schedule, passes)]


def _edges(schedule: Schedule, passes: Passes) -> Iterator[tuple[tf.Operation, tf.Operation]]:
    """What `schedule` adds to the order of operations: pairs of one before another."""
    num_rounds = 1 + max((in_round for in_round, _ in passes.calls), default=0)
    for actions in schedule.orders:
        order = [(i, action) for i in range(num_rounds) for action in actions]
        calls = [passes.calls[each] for each in order if each in passes.calls]
        for before, after in itertools.pairwise(calls):
            yield from itertools.product(before, after)
        # What an action takes from the host is copied while the one before it runs.
        for earlier, each in zip(order, order[2:], strict=False):
            if each in passes.fetches:
                yield from itertools.product(passes.calls[earlier], passes.fetches[each])
        yield from _behind_copies([each for each in order if each in passes.calls], passes)


def _call_by_call(
    schedule: Schedule, passes: Passes
) -> Iterator[tuple[tf.Operation, tf.Operation]]:
    """A call of all microbatches before their next one, if this needs what came of all.

    Microbatches make the same calls one after another, so that no call needs one of later number:

        stage 0    call 0 of all, call 1 of all    backward of call 1, of call 0
                          \\   /
                       rows of all
    """
    numbers: collections.Counter[int] = collections.Counter()
    calls: dict[int, list[tuple]] = collections.defaultdict(list)
    for operation, action in passes.action_of.items():  # of each microbatch as it was traced
        numbers[action.microbatch] += 1
        place = numbers[action.microbatch], action.microbatch
        calls[schedule.device_of[action.stage]].append((*place, operation))
    for own in calls.values():
        ordered = sorted(own, key=lambda call: call[:2])
        yield from itertools.pairwise(operation for *_, operation in ordered)


def _behind_copies(
    order: Sequence[Pass], passes: Passes
) -> Iterator[tuple[tf.Operation, tf.Operation]]:
    """A forward pass of a device waits until what it has kept is on the host, but for the last.

    A pass of an asynchronous device ends when it is launched: without this all forward passes
    would be, and all that they keep on the device, while the first copy is still on its way.
    """
    waiting: list[tf.Operation] = []
    for earlier, each in zip(order, order[2:], strict=False):
        waiting += passes.copies.get(earlier, ())
        if each[1].kind == "forward":
            yield from itertools.product(waiting, passes.calls[each])
            waiting = []
