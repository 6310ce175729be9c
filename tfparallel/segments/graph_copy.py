"""Operations of one graph, copied into another one, and functions made of graphs.

TensorFlow's gradient of a function keeps every tensor that it needs, as outputs of the function.
Copied operation by operation it can be put together in other ways: some tensors computed again
instead of kept, or the gradient of the inputs in one function and that of the weights in another.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import (
    FuncGraph,
    RemoteFunction,
    function_of_graph,
    record,
    unique_number,
)
from tfparallel.internals.graph_functions import on_other_devices
from tfparallel.internals.graphs import (
    add_function,
    functions_of,
    only_wait_for,
)
from tfparallel.segments.sizes_in_functions import keep_sizes_in_host_memory
from tfparallel.segments.threads import has_one_thread

Places = Callable[[str], Mapping[str, str]]

# Written by what an operation is created in, which writes its own into a copy.
_OF_ITS_PLACE = ("_class", "_tpu_replicate")


class GraphCopy:
    """Copies operations of `source` into the graph that is under construction where it is used.

    Args:
        source: where the operations are.
        given: tensors to use in place of some of `source`'s, by `id` of the latter; what they
            depend on is not copied.
    """

    def __init__(self, source: FuncGraph, given: Mapping[int, tf.Tensor]):
        self._source, self._tensors = source, dict(given)
        self._operations: dict[tf.Operation, tf.Operation] = {}

    def tensors(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """The copies of `tensors`, with all operations that they depend on."""
        tensors = list(tensors)
        graph = tf.compat.v1.get_default_graph()
        for function in functions_of(self._source):
            add_function(graph, function)
        missing = [tensor for tensor in tensors if id(tensor) not in self._tensors]
        for operation in depended_on(missing, lambda x: id(x) in self._tensors):
            self._copy(operation, graph)
        return [self._tensors[id(tensor)] for tensor in tensors]

    def _copy(self, operation: tf.Operation, graph: tf.Graph) -> None:
        if operation in self._operations:
            return
        before = [self._operations[op] for op in operation.control_inputs if op in self._operations]
        attributes = {k: v for k, v in operation.node_def.attr.items() if k not in _OF_ITS_PLACE}
        with tf.control_dependencies(before), tf.device(operation.device):
            copy = graph.create_op(
                operation.type,
                [self._tensors[id(tensor)] for tensor in operation.inputs],
                [tensor.dtype for tensor in operation.outputs],
                attrs=attributes,
                name=operation.name,
            )
        self._operations[operation] = copy
        for old, new in zip(operation.outputs, copy.outputs, strict=True):
            self._tensors.setdefault(id(old), new)


def depended_on(
    tensors: Iterable[tf.Tensor], is_given: Callable[[tf.Tensor], bool]
) -> list[tf.Operation]:
    """All operations that `tensors` depend on, each behind those that it depends on itself.

    Args:
        tensors: of one graph, none of them given.
        is_given: whether a tensor is there without its operation.
    """
    done: dict[tf.Operation, None] = {}
    stack = [(tensor.op, False) for tensor in tensors]
    while stack:
        operation, has_inputs = stack.pop()
        if operation in done:
            continue
        if has_inputs:
            done[operation] = None
            continue
        stack.append((operation, True))
        stack += [(x.op, False) for x in operation.inputs if not is_given(x) and x.op not in done]
    return list(done)


class GraphFunction:
    """A function of flat lists of tensors, which TensorFlow does not inline where it is called.

    What is called is a small function around the large one: TensorFlow unpacks the body of a called
    function at every call, and places and optimises that of a function within.

    Args:
        name: what errors and profiles call it.
        graph: of the function.
        inputs: placeholders of `graph`, in the order in which a call gives the values.
        outputs: tensors of `graph`.
        places: for a device that calls it, which device does then what one in `graph` does.
            Default: `graph`'s own do it, whoever calls.
        ends: operations of `graph` that are done at its end. Beside them only what `outputs` need
            is in the function. Default: all of `graph` is.
    """

    def __init__(
        self,
        name: str,
        graph: FuncGraph,
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
        places: Places = lambda device: {},
        ends: Sequence[tf.Operation] | None = None,
    ):
        self._has_narrow = any(x.dtype == tf.int32 for x in (*inputs, *outputs))
        every = [x for operation in graph.get_operations() for x in operation.outputs]
        keep_sizes_in_host_memory(depended_on(every, lambda _: False))
        operations = graph.get_operations()
        if ends is not None:
            graph.control_outputs.extend(ends)
            operations = _needed(graph, inputs, outputs, ends)
        body = _define(f"{name}_body", graph, inputs, outputs, operations)
        around = [_around(name, body, inputs, None)]
        if has_one_thread() and not functions_of(graph):
            around.append(_around(name, body, inputs, _IN_ORDER))
        self._devices = {op.device for op in operations} - {""}
        self._take(around)
        self._places = places
        self._elsewhere: dict[str, GraphFunction | None] = {}

    def _take(self, around: Sequence) -> None:
        self._around = around
        remotes = [RemoteFunction(each) for each in around]
        self._remote, self._in_order = remotes[0], remotes[-1]

    def _at(self, device: str) -> "GraphFunction":
        """This, with the devices that `device` calls it for: copied once, and not traced."""
        if device not in self._elsewhere:
            moves = {old: new for old, new in self._places(device).items() if old != new}
            called = self._around[0].children if moves else []
            written = {node.device for each in called for node in each.cached_definition.node_def}
            self._elsewhere[device] = None if written.isdisjoint(moves) else self._moved(moves)
        return self._elsewhere[device] or self

    def _moved(self, moves: Mapping[str, str]) -> "GraphFunction":
        moved = copy.copy(self)
        moved._devices = {moves.get(each, each) for each in self._devices}
        moved._take([on_other_devices(each, moves) for each in self._around])
        return moved

    def __call__(self, device: str, arguments: Sequence) -> list[tf.Tensor]:
        """Calls it on `device`, without any record on gradient tapes.

        Some of its work is elsewhere if it is placed on another device, or a variable or table that
        it uses is. So may be int32 of its arguments and results: `wide_integers.py` says how to
        spare that.
        """
        return self._at(device)._called(device, arguments)

    def _called(self, device: str, arguments: Sequence) -> list[tf.Tensor]:
        resources = [x for x in arguments if x.dtype == tf.resource]
        is_elsewhere = self._devices - {device} or any(x.device != device for x in resources)
        if self._has_narrow or is_elsewhere:
            with tf.device(device):
                return list(self._around[0].call_flat(*arguments))
        with record.stop_recording():
            return (self._in_order if _is_cpu(device) else self._remote)(device, arguments)


# Note: operations one after another. Where operations have one thread each, TensorFlow still hands
# them from thread to thread, and threads that look for the next one take time from others. A pass
# is a chain of operations, so one thread that runs all of them in order is faster. It would wait
# for itself where an operation waits for another device, or calls a function that needs a thread:
# such passes are run as ever. Where a pass ends, its caller would hand each result to a thread of
# its own; one operation takes them all, which halves the switches between threads.
_IN_ORDER = "SINGLE_THREADED_EXECUTOR"


def _is_cpu(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).device_type == "CPU"


def _around(name: str, body: Any, inputs: Sequence, executor: str | None) -> Any:
    """A function that calls `body`, which that executor of TensorFlow runs, or the usual one."""
    graph = FuncGraph(name)
    with graph.as_default(), tf.experimental.function_executor_type(executor):
        around_inputs = [graph.capture(tensor) for tensor in inputs]
        around_outputs = list(body.call_flat(*around_inputs))
        if executor == _IN_ORDER:
            around_outputs = list(tf.identity_n(around_outputs))
    calls = [op for op in graph.get_operations() if op.type == "StatefulPartitionedCall"]
    graph.control_outputs.extend(calls)
    return _define(name, graph, around_inputs, around_outputs)


def _define(
    name: str,
    graph: FuncGraph,
    inputs: Sequence,
    outputs: Sequence,
    operations: Sequence[tf.Operation] | None = None,
) -> Any:
    graph.inputs, graph.outputs = list(inputs), list(outputs)
    return function_of_graph(f"{name}_{unique_number()}", graph, operations)


def _needed(
    graph: FuncGraph, inputs: Sequence, outputs: Sequence, ends: Sequence[tf.Operation]
) -> list[tf.Operation]:
    """Operations of `graph` on the way from `inputs` to `outputs` and `ends`.

    These wait for none of the others any more.
    """
    given = set(map(id, inputs))
    waited_for = [before for end in ends for before in end.control_inputs]
    read = [x for op in (*ends, *waited_for) for x in (*op.inputs, *op.outputs)]
    missing = [x for x in (*outputs, *read) if id(x) not in given]
    found = {*depended_on(missing, lambda x: id(x) in given), *ends, *(x.op for x in inputs)}
    operations = [operation for operation in graph.get_operations() if operation in found]
    for operation in operations:
        only_wait_for(operation, found)
    return operations
