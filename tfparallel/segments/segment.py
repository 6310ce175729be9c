"""One call of a layer in the graph of a step, and what its backward pass takes instead.

A layer is called as ever, so that all it does (masks, losses, statistics, collectives, loops) is as
ever. What a backward pass would keep from its forward pass is known when the step has been traced:
tensors of the call that later operations take. These then take other tensors of the same values,
which are made when the gradient of the layer's outputs is there.

                  forward                    backward
    as traced     x -> W h -> y   ........   dy -> f(dy, W, h) -> dx
    as it runs    x -> W h -> y   . x, w .   dy -> W' h' -> f(dy, W', h') -> dx

`W'` is gathered again from the own part `w`, `h'` is computed again from `x`. An operation takes
only what was traced before it, in its place too, so no circle can come of it. What is kept may
be on the host meanwhile (`host_copies.py`).
"""

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import tensorflow as tf

from tfparallel.internals.graphs import is_stateful, run_after, take_instead
from tfparallel.segments.graph_copy import GraphCopy
from tfparallel.segments.host_copies import ASKS_SHAPE, HostCopies, of_backward


class Segment:
    """A call, while the step is traced.

    Attributes:
        inputs: tensors that the call was given.
        backward_from: how many operations there were when the backward pass began; None before.
        is_differentiated: whether a tape follows its outputs: not before the first trained weight.
        gate: what is done again waits for these tensors.
        weights: tensors that were put together for the call.
        replaced: by the `id` of a tensor, what later operations take instead of it.
        recomputes: whether an operation's results are computed again from the tensors it takes.
        offloads: whether what it keeps is on the host until its backward pass.
        computed: operations of the call, on the way to its outputs.
        forward_from: how many operations there were before the call.
        own_backward_from: as `backward_from`, of its own gradient: weights are gathered earlier.
        fetch_gate: what comes back from the host waits for these tensors.
    """

    def __init__(self, inputs: Sequence[tf.Tensor]):
        self.inputs = list(inputs)
        self.backward_from: int | None = None
        self.is_differentiated = False
        self.gate: Sequence[tf.Tensor] = ()
        self.weights: Sequence[tf.Tensor] = ()
        self.replaced: dict[int, tf.Tensor] = {}
        self.recomputes: Callable[[tf.Operation], bool] = lambda operation: False
        self.offloads = False
        self.computed: Collection[tf.Operation] = ()
        self.forward_from = 0
        self.own_backward_from = 0
        self.fetch_gate: Sequence[tf.Tensor] = ()


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


def computed_between(
    graph: tf.Graph,
    begin: int,
    outputs: Collection[tf.Tensor],
    is_kept: Callable[[tf.Operation], bool],
    own_devices: Collection[str] = (),
) -> set[tf.Operation]:
    """Operations of a call on the way to `outputs`, from those on that are `is_kept`.

    Not those of `outputs` themselves; not what another device computes, for another replica.

    Args:
        begin: how many operations there were before the call.
        own_devices: those that compute the replica, beside what computes `outputs`.
    """
    inside = set(graph.get_operations()[begin:])
    devices = {*own_devices, *(tensor.op.device for tensor in outputs)}
    made: set[tf.Operation] = set()
    todo = [x.op for tensor in outputs for x in tensor.op.inputs]
    while todo:
        operation = todo.pop()
        if operation in made or operation not in inside:
            continue
        if operation.type == "Const" or operation.device not in devices or is_kept(operation):
            continue
        made.add(operation)
        todo += [x.op for x in operation.inputs]
    return made - {tensor.op for tensor in outputs}


def rewire(graph: tf.Graph, segments: Iterable[Segment], in_xla: bool = False) -> None:
    """Has the backward passes of `segments` take what is to be taken instead.

    Args:
        graph: of the step, traced to its end.
        segments: those whose backward pass was traced, and others.
        in_xla: whether XLA compiles the step.
    """
    begun = [segment for segment in segments if segment.backward_from is not None]
    operations = graph.get_operations()
    copies = HostCopies(graph, _made_of_weights(begun, operations))
    for segment in begun:
        if segment.replaced:
            _also(segment, made_of(segment.weights))
        later = operations[segment.backward_from :]
        wanted = _wanted(segment, later)
        if wanted:
            tensors = {id(x): x for _, _, x in wanted}
            instead = _instead(graph, segment, tensors, copies, in_xla)
            for operation, index, tensor in wanted:
                take_instead(operation, index, instead[id(tensor)])
    offloaded = [segment for segment in begun if segment.offloads]
    if offloaded:  # else the whole graph would be walked for nothing
        _offload(offloaded, operations, copies)
        _wait_for_copies(offloaded, operations, copies.made)


def _offload(
    segments: Iterable[Segment], operations: Sequence[tf.Operation], copies: HostCopies
) -> None:
    """Has the backward passes of `segments` take from the host what is kept for them.

    The one that begins last comes first: what two of them keep, each takes for itself.
    """
    begun = [(segment.own_backward_from, segment) for segment in segments if segment.gate]
    own = of_backward(operations, [x for _, segment in begun for x in segment.gate])
    for begin, segment in sorted(begun, key=lambda each: each[0], reverse=True):
        given = set(map(id, segment.inputs))
        for operation in operations[begin:]:
            if operation not in own or operation.type in ASKS_SHAPE:
                continue
            for index, tensor in enumerate(operation.inputs):
                is_own = id(tensor) in given or tensor.op in segment.computed
                if is_own and copies.holds(tensor):
                    back = copies.fetched(tensor, segment.fetch_gate)
                    take_instead(operation, index, back)


def _wait_for_copies(
    segments: Iterable[Segment],
    operations: Sequence[tf.Operation],
    copies: Collection[tf.Operation],
) -> None:
    """Has a forward pass wait until what the segments before the last have kept is on the host.

    An asynchronous device is given its forward passes ahead of time: without this they, and all
    that they keep, could be there before the first copy is done. A copy is of what was traced
    before, so no circle can come of it.

    Args:
        segments: that offload.
        operations: of the step, before it was rewired.
        copies: of what they keep, on the host.
    """
    traced = {operation: i for i, operation in enumerate(operations)}
    by_device: dict[str, list[Segment]] = collections.defaultdict(list)
    for segment in sorted(segments, key=lambda each: each.forward_from):
        if segment.computed:  # else it is in one that offloads
            by_device[next(iter(segment.computed)).device].append(segment)
    for device, own in by_device.items():
        of_device = [copy for copy in copies if copy.inputs[0].device == device]
        waiting = sorted(of_device, key=lambda copy: traced[copy.inputs[0].op], reverse=True)
        for last, segment in itertools.pairwise(own):
            done = []
            while waiting and traced[waiting[-1].inputs[0].op] < last.forward_from:
                done.append(waiting.pop())
            takers = {each for x in segment.inputs for each in x.consumers()}
            for taker in takers.intersection(segment.computed):
                for copy in done:
                    run_after(taker, copy)


def _made_of_weights(
    segments: Sequence[Segment], operations: Sequence[tf.Operation]
) -> set[tf.Operation]:
    """What stays where it is, though a segment is to be on the host; nothing where none is."""
    if not any(segment.offloads for segment in segments):
        return set()
    read = [y for op in operations if op.type == "ReadVariableOp" for y in op.outputs]
    weights = [*read, *(x for segment in segments for x in segment.weights)]
    return made_of(weights) | {x.op for x in weights}


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
    graph: tf.Graph,
    segment: Segment,
    tensors: Mapping[int, tf.Tensor],
    copies: HostCopies,
    in_xla: bool,
) -> dict[int, tf.Tensor]:
    """What is taken instead of `tensors`: replaced, or computed again behind the segment's gate."""
    given = dict(segment.replaced)
    again = [x for key, x in tensors.items() if key not in given]
    with graph.as_default(), tf.control_dependencies(segment.gate):
        for tensor in _frontier(segment, again):
            if tensor.op.type == "Const" or tensor.dtype == tf.resource:
                given[id(tensor)] = tensor
                continue
            if segment.offloads and copies.holds(tensor):
                given[id(tensor)] = copies.fetched(tensor, segment.fetch_gate)
                continue
            with tf.device(tensor.device):
                kept = _told_apart(tensor, segment.gate) if in_xla else tensor
                given[id(tensor)] = tf.identity(kept, "kept")
    with graph.as_default():
        done = GraphCopy(graph, given).tensors(again)
    return {**given, **dict(zip(map(id, again), done, strict=True))}


def _told_apart(tensor: tf.Tensor, gate: Sequence[tf.Tensor]) -> tf.Tensor:
    """The same numbers, which XLA does not know to be the same before one of `gate` is there.

    XLA heeds no order of operations, and would make one of what is computed twice of the same. So
    a zero is added that takes a number of the gradient, as in TensorFlow's `recompute_grad`.
    Weights stay as they are: what else is computed with them differs.
    """
    numbers = [x for x in gate if x.dtype.is_floating]
    if not tensor.dtype.is_floating or tensor.op.type == "ReadVariableOp" or not numbers:
        return tensor
    number = tf.reduce_max(tf.reshape(numbers[0], [-1])[:1])  # of none it is -inf
    is_there = tf.cast(number, tf.bool)  # also where the number is none
    zero = tf.where(tf.equal(is_there, is_there), 0.0, float("nan"))
    return tensor + tf.cast(zero, tensor.dtype)


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
