"""One call of a layer in the graph of a step, and what its backward pass takes instead.

A layer is called as ever, so that all it does (masks, losses, statistics, collectives, loops) is as
ever. What a backward pass would keep from its forward pass is known when the step has been traced:
tensors of the call that later operations take. These then take other tensors of the same values,
which are made when the gradient of the layer's outputs is there.

                  forward                    backward
    as traced     x -> W h -> y   ........   dy -> f(dy, W, h) -> dx
    as it runs    x -> W h -> y   . x, w .   dy -> W' h' -> f(dy, W', h') -> dx

`W'` is gathered again from the own part `w`, `h'` is computed again from `x`. An operation takes
only what was traced before it, in its place too, so no circle can come of it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import tensorflow as tf

from tfparallel.internals.graphs import is_stateful, take_instead
from tfparallel.segments.graph_copy import GraphCopy

ASKS_SHAPE = frozenset({"Shape", "ShapeN", "Size", "Rank"})  # as soon as the tensor is there


class Segment:
    """A call, while the step is traced.

    Attributes:
        inputs: tensors that the call was given.
        backward_from: how many operations there were when the backward pass began; None before.
        gate: what is done again waits for these tensors.
        weights: tensors that were put together for the call.
        replaced: by the `id` of a tensor, what later operations take instead of it.
        recomputes: whether an operation's results are computed again from the tensors it takes.
    """

    def __init__(self, inputs: Sequence[tf.Tensor]):
        self.inputs = list(inputs)
        self.backward_from: int | None = None
        self.gate: Sequence[tf.Tensor] = ()
        self.weights: Sequence[tf.Tensor] = ()
        self.replaced: dict[int, tf.Tensor] = {}
        self.recomputes: Callable[[tf.Operation], bool] = lambda operation: False


def made_of(tensors: Collection[tf.Tensor]) -> set[tf.Operation]:
    """Operations whose results are made of these `tensors` and constants alone: casts and such."""
    made: set[tf.Operation] = set()
    todo = list(tensors)
    known = set(map(id, tensors))
    while todo:
        for operation in todo.pop().consumers():
            if operation in made or is_stateful(operation):
                continue
            if all(
                id(x) in known or x.op in made or x.op.type == "Const" for x in operation.inputs
            ):
                made.add(operation)
                todo += operation.outputs
    return made


def made_between(graph: tf.Graph, begin: int, outputs: Collection[tf.Tensor]) -> set[tf.Operation]:
    """What a call computes on its way to `outputs`, and can be computed again.

    Not what has effects or is read or received, which is kept; not `outputs` themselves, which
    whoever comes next keeps; not what another device computes, for another replica.

    Args:
        begin: how many operations there were before the call.
    """
    inside = set(graph.get_operations()[begin:])
    devices = {tensor.op.device for tensor in outputs}
    made: set[tf.Operation] = set()
    todo = [x.op for tensor in outputs for x in tensor.op.inputs]
    while todo:
        operation = todo.pop()
        if operation in made or operation not in inside:
            continue
        if is_stateful(operation) or operation.type == "Const" or operation.device not in devices:
            continue
        made.add(operation)
        todo += [x.op for x in operation.inputs]
    return made - {tensor.op for tensor in outputs}


def rewire(graph: tf.Graph, segments: Iterable[Segment]) -> None:
    """Has the backward passes of `segments` take what is to be taken instead.

    Args:
        graph: of the step, traced to its end.
        segments: those whose backward pass was traced, and others.
    """
    begun = [segment for segment in segments if segment.backward_from is not None]
    operations = graph.get_operations()
    for segment in begun:
        if segment.replaced:
            _also(segment, made_of(segment.weights))
        later = operations[segment.backward_from :]
        wanted = _wanted(segment, later)
        if wanted:
            instead = _instead(graph, segment, {id(x): x for _, _, x in wanted})
            for operation, index, tensor in wanted:
                take_instead(operation, index, instead[id(tensor)])


def _also(segment: Segment, operations: Collection[tf.Operation]) -> None:
    chosen = segment.recomputes
    segment.recomputes = lambda operation: operation in operations or chosen(operation)


def _wanted(
    segment: Segment, later: Iterable[tf.Operation]
) -> list[tuple[tf.Operation, int, tf.Tensor]]:
    return [
        (operation, index, tensor)
        for operation in later
        if operation.type not in ASKS_SHAPE
        for index, tensor in enumerate(operation.inputs)
        if id(tensor) in segment.replaced or segment.recomputes(tensor.op)
    ]


def _instead(
    graph: tf.Graph, segment: Segment, tensors: Mapping[int, tf.Tensor]
) -> dict[int, tf.Tensor]:
    """What is taken instead of `tensors`: replaced, or computed again behind the segment's gate."""
    given = dict(segment.replaced)
    again = [x for key, x in tensors.items() if key not in given]
    with graph.as_default(), tf.control_dependencies(segment.gate):
        for tensor in _frontier(segment, again):
            if tensor.op.type == "Const" or tensor.dtype == tf.resource:
                given[id(tensor)] = tensor
                continue
            with tf.device(tensor.device):
                given[id(tensor)] = tf.identity(tensor, "kept")
    with graph.as_default():
        copies = GraphCopy(graph, given).tensors(again)
    return {**given, **dict(zip(map(id, again), copies, strict=True))}


def _frontier(segment: Segment, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What has to be there for `tensors` to be computed again."""
    frontier: dict[int, tf.Tensor] = {}
    seen: set[tf.Operation] = set()
    todo = [tensor.op for tensor in tensors]
    while todo:
        operation = todo.pop()
        if operation in seen:
            continue
        seen.add(operation)
        for tensor in operation.inputs:
            if id(tensor) in segment.replaced:
                continue
            if segment.recomputes(tensor.op):
                todo.append(tensor.op)
            else:
                frontier[id(tensor)] = tensor
    return list(frontier.values())
