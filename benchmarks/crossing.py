"""Counts the bytes that a traced step sends from device to device, of its graph.

An edge between operations on two devices is a tensor that is sent, once to each device that takes
it. What nothing needs is left out, and functions that TensorFlow inlines are looked into, as it
does both; others are of one device, to which what they take is sent. Tensors of less than `_LEAST`
values (norms, counts, rates) and whole numbers are not counted.
"""

import collections
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

_LEAST = 64
_INLINED = {"PartitionedCall", "StatefulPartitionedCall"}
_CUTS_ROWS = "StridedSlice"  # of a batch


class Made(NamedTuple):
    """Where a tensor is made.

    Attributes:
        key: tells it from all others, of calls of the same function too.
        device: its device, for a variable's handle the variable's.
        is_of_batch: whether it is rows that were cut out of a batch.
    """

    key: Any
    device: str
    is_of_batch: bool = False


def bytes_by_link(graph: Any, rows: int, home: str) -> dict[tuple[str, str, bool], int]:
    """Bytes that a step sends.

    Args:
        graph: a `FuncGraph`.
        rows: of a tensor whose number of rows is not known.
        home: the device of what has none.

    Returns:
        By the device that sends, the one that is sent to, and whether these are rows of the batch.
    """
    total: dict = collections.Counter()
    for (made, target), size in _sent(graph, rows, home).items():
        total[made.device, target, made.is_of_batch] += size
    return total


def copies_by_link(graph: Any, rows: int, home: str) -> dict[tuple[str, str], int]:
    """How many tensors a step sends, by the device that sends and the one that is sent to.

    Args:
        graph, rows, home: as for `bytes_by_link`.
    """
    ends = [(made.device, target) for made, target in _sent(graph, rows, home)]
    return collections.Counter(ends)


def _sent(graph: Any, rows: int, home: str) -> dict[tuple[Made, str], int]:
    counter = _Counter(rows)
    counter.walk(_Body(graph, {}, (), home))
    return counter.sent


class _Body:
    """A graph as it is called at one place.

    Args:
        graph: of a function.
        given: where its arguments are made, by the `id` of their placeholders.
        path: of the calls to it.
        home: the device of what has none.
    """

    def __init__(self, graph: Any, given: Mapping[int, Made], path: tuple, home: str):
        self.graph, self.given, self.path, self.home = graph, given, path, home
        self._outer = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        self._inlined: dict = {}

    def made(self, tensor: tf.Tensor) -> Made:
        """Where a tensor of the graph is made."""
        if id(tensor) in self.given:
            return self.given[id(tensor)]
        operation = tensor.op
        inlined = self.inlined(operation)
        if inlined is not None and tensor.value_index < len(inlined.graph.outputs):
            return inlined.made(inlined.graph.outputs[tensor.value_index])
        if tensor.dtype == tf.resource:
            handle = self._outer.get(id(tensor), tensor)
            return Made((self.path, tensor.ref()), short(handle.device or self.home))
        key = (self.path, tensor.ref())
        return Made(key, self.device(operation), operation.type == _CUTS_ROWS)

    def device(self, operation: tf.Operation) -> str:
        """The device of an operation; a variable is read and written where it is."""
        if operation.type == "RemoteCall":
            target = tf.get_static_value(operation.inputs[0])
            if target is not None:
                return short(target.item().decode())
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource and operation.type != "RemoteCall":
                return self.made(tensor).device
        return short(operation.device or self.home)

    def function(self, operation: tf.Operation) -> Any:
        """The graph of the function that an operation calls."""
        return self.graph._get_function(operation.get_attr("f").name).graph

    def _is_called(self, operation: tf.Operation) -> bool:
        """Whether a function is called as it is, which one of several devices must not be."""
        function = self.graph._get_function(operation.get_attr("f").name)
        if not function.cached_definition.attr["_noinline"].b:
            return False
        devices = _devices_in(function.graph)
        if len(devices) > 1:
            raise ValueError(
                "Expected functions of several devices to be inlined: what others take, keep and "
                f"return goes through the device of the call, which is not counted. Received: "
                f"{operation.name}, on {sorted(devices)}."
            )
        return True

    def inlined(self, operation: tf.Operation) -> "_Body | None":
        """The body of a call of a function, if TensorFlow inlines it."""
        if operation.type not in _INLINED or self._is_called(operation):
            return None
        if operation not in self._inlined:
            graph = self.function(operation)
            pairs = zip(graph.inputs, operation.inputs, strict=True)
            given = {id(inner): self.made(outer) for inner, outer in pairs}
            path, home = (*self.path, operation.name), short(operation.device or self.home)
            self._inlined[operation] = _Body(graph, given, path, home)
        return self._inlined[operation]


class _Counter:
    """Collects what is sent.

    Attributes:
        sent: bytes by tensor and the device that it is sent to.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self.sent: dict[tuple[Made, str], int] = {}

    def walk(self, body: _Body, outputs: Collection | None = None) -> None:
        """Counts what the operations take that `outputs`, or all results, and effects need."""
        outputs = body.graph.outputs if outputs is None else outputs
        needed = _needed(body.graph, outputs)
        for operation in needed:
            inlined = body.inlined(operation)
            if inlined is None:
                self._count(body, operation)
                continue
            taken = {x.value_index for op in needed for x in op.inputs if x.op is operation}
            taken |= {x.value_index for x in outputs if x.op is operation}
            of_body = inlined.graph.outputs  # where there are none, a call returns a number
            self.walk(inlined, [of_body[i] for i in taken if i < len(of_body)])

    def _count(self, body: _Body, operation: tf.Operation) -> None:
        target = body.device(operation)
        for tensor in operation.inputs:
            if tensor.dtype.is_floating:
                made, size = body.made(tensor), self._size(tensor)
                if made.device != target and size:
                    self.sent[made, target] = size

    def _size(self, tensor: tf.Tensor) -> int:
        if tensor.shape.rank is None:
            return 0
        count = math.prod(self._rows if size is None else size for size in tensor.shape)
        return count * tensor.dtype.size if count >= _LEAST else 0


def _needed(graph: Any, outputs: Collection) -> set:
    """The operations that results and side effects of a graph need."""
    todo = [x.op for x in outputs] + list(graph.control_outputs)
    needed = set(todo)
    while todo:
        operation = todo.pop()
        new = {x.op for x in operation.inputs} | set(operation.control_inputs)
        todo += new - needed
        needed |= new
    return needed


def _devices_in(graph: Any) -> set[str]:
    """Those of a graph's operations, and of the functions that it calls."""
    found = {short(operation.device) for operation in graph.get_operations() if operation.device}
    calls = [op for op in graph.get_operations() if op.type in _INLINED]
    inner = [graph._get_function(op.get_attr("f").name).graph for op in calls]
    return found.union(*map(_devices_in, inner))


def short(device: str) -> str:
    """A device's name without the machine's."""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type or 'CPU'}:{spec.device_index or 0}"
