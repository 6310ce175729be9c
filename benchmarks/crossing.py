"""Counts the bytes that a traced step sends from device to device, of its graph.

An edge between operations on two devices is a tensor that is sent, once to each device that takes
it. What nothing needs is left out, as TensorFlow does. What a function takes is sent to the device
of its call, and from there to those where it computes; what it returns from others comes back to
that device. Of one that TensorFlow inlines, both go straight to who takes it. Tensors of less than
`_LEAST` values (norms, counts, rates) and whole numbers are not counted.
"""

import collections
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

_LEAST = 64
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_CUTS_ROWS = "StridedSlice"  # of a batch


class Made(NamedTuple):
    """Where a tensor is made.

    Attributes:
        path: of the calls in which it is made.
        key: tells it from all others made there.
        device: its device, for a variable's handle the variable's.
        is_of_batch: whether it is rows that were cut out of a batch.
    """

    path: tuple
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
    """How many tensors a step's own graph sends, without the functions that it calls.

    Args:
        graph, rows, home: as for `bytes_by_link`.

    Returns:
        By the device that sends and the one that is sent to.
    """
    sent = _sent(graph, rows, home)
    ends = [(made.device, target) for made, target in sent if not made.path]
    return collections.Counter(ends)


def _sent(graph: Any, rows: int, home: str) -> dict[tuple[Made, str], int]:
    counter = _Counter(rows)
    counter.walk(_Body(graph, {}, (), home, graph.outputs))
    return counter.sent


class _Body:
    """A graph as it is called at one place.

    Args:
        graph: of a function.
        given: where its arguments are made, by the `id` of their placeholders.
        path: of the calls to it.
        home: the device of what has none.
        outputs: that it returns.
        is_inlined: whether it becomes a part of the graph around it.
        moves: which device does what one in the graph does, where that is another.
    """

    def __init__(
        self,
        graph: Any,
        given: Mapping[int, Made],
        path: tuple,
        home: str,
        outputs: Sequence = (),
        is_inlined: bool = True,
        moves: Mapping[str, str] | None = None,
    ):
        self._moves = moves or {}
        self.graph, self.given, self.path, self.home = graph, given, path, home
        self.outputs, self.is_inlined = outputs, is_inlined
        self._outer = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        self._entered: dict = {}

    def made(self, tensor: tf.Tensor) -> Made:
        """Where a tensor of the graph is made."""
        if id(tensor) in self.given:
            return self.given[id(tensor)]
        operation = tensor.op
        body = self.entered(operation)
        if body is not None and tensor.value_index < len(body.outputs):
            if body.is_inlined:
                return body.made(body.outputs[tensor.value_index])
            return Made(self.path, tensor.ref(), body.home)
        if tensor.dtype == tf.resource:
            handle = self._outer.get(id(tensor), tensor)
            return Made(self.path, tensor.ref(), short(handle.device or self.home))
        is_of_batch = operation.type == _CUTS_ROWS
        return Made(self.path, tensor.ref(), self.device(operation), is_of_batch)

    def device(self, operation: tf.Operation) -> str:
        """The device of an operation; a variable is read and written where it is."""
        if operation.type == "RemoteCall":
            target = tf.get_static_value(operation.inputs[0])
            if target is not None:
                return short(target.item().decode())
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource and operation.type != "RemoteCall":
                return self.made(tensor).device
        return self._own_device(operation)

    def _own_device(self, operation: tf.Operation) -> str:
        return short(self._moves.get(operation.device, operation.device) or self.home)

    def function(self, operation: tf.Operation) -> Any:
        """The graph of the function that an operation calls."""
        return self.graph._get_function(operation.get_attr("f").name).graph

    def entered(self, operation: tf.Operation) -> "_Body | None":
        """The body of what an operation calls, if that is a function of several devices."""
        if operation.type not in _CALLS:
            return None
        if operation not in self._entered:
            self._entered[operation] = self._body_of(operation)
        return self._entered[operation]

    def _body_of(self, operation: tf.Operation) -> "_Body":
        function = self.graph._get_function(operation.get_attr("f").name)
        is_inlined = not function.cached_definition.attr["_noinline"].b
        graph, moves = function.graph, getattr(function, "devices", self._moves)
        inputs, outputs = getattr(function, "ends", (graph.inputs, graph.outputs))
        path, home = (*self.path, operation.name), self._own_device(operation)
        given = {}
        for inner, outer in zip(inputs, operation.inputs, strict=True):
            is_where_it_was = is_inlined or inner.dtype == tf.resource
            here = Made(path, inner.ref(), home)
            given[id(inner)] = self.made(outer) if is_where_it_was else here
        return _Body(graph, given, path, home, outputs, is_inlined, moves)


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
        outputs = body.outputs if outputs is None else outputs
        needed = _needed(body.graph, outputs)
        for operation in needed:
            entered = body.entered(operation)
            if entered is None:
                self._count(body, operation.inputs, body.device(operation))
                continue
            if not entered.is_inlined:
                self._count(body, operation.inputs, entered.home)
            taken = {x.value_index for op in needed for x in op.inputs if x.op is operation}
            taken |= {x.value_index for x in outputs if x.op is operation}
            of_body = entered.outputs  # where there are none, a call returns a number
            returned = [of_body[i] for i in taken if i < len(of_body)]
            if not entered.is_inlined:  # which computes whatever it returns, taken or not
                returned = of_body
                self._count(entered, returned, entered.home)
            self.walk(entered, returned)

    def _count(self, body: _Body, tensors: Iterable, target: str) -> None:
        for tensor in tensors:
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


def short(device: str) -> str:
    """A device's name without the machine's."""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type or 'CPU'}:{spec.device_index or 0}"
