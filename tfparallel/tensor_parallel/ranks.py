"""Processes that compute one model together: each traces the whole step, and computes its part.

In the graph of a rank a list of parts has all of them, as where one process controls all devices.
Of what other ranks store there are stand-ins. Where parts meet, in a sum or a whole, the ranks
exchange their own ones, so that what meets is right on all of them:

    rank 0    x0  (x1)                   rank 1    (x0)  x1
               |                                         |
               '---------- all-gather or all-reduce -----'
               |                                         |
              whole                                    whole

What is computed of stand-ins alone leads nowhere, and TensorFlow prunes it. So a graph says what
that of one controller says. When a step is traced, `_TracedStep.finish` looks at what is left:
collectives get the order of the program, and anything that would still read a stand-in is an error.

A branch of `tf.cond`, such as the update that ends an accumulation, has collectives of its own. All
ranks take the same one, and the whole branch has its place in that order.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.communication.collectives import LeftOutIfUnread
from tfparallel.coordination.agreement import Agreement, DisagreementError
from tfparallel.internals import ResourceVariable, record
from tfparallel.internals.graphs import branches_of, is_branch, is_stateful, run_after
from tfparallel.tensor_parallel.rows import Rows

_thread = threading.local()


def ranks_of_caller() -> "ModelRanks | None":
    """The ranks whose step the caller traces or runs; None where one process has all parts."""
    return getattr(_thread, "ranks", None)


class ModelRanks:
    """Ranks of a job, which have a part of each split tensor each, in the order of ranks.

    Args:
        collectives: between them.
        agreement: of these ranks.
        device: of this rank, where collectives are called.

    Attributes:
        index: the place of this rank among them, and of its parts.
        size: how many ranks there are.
    """

    def __init__(self, collectives: LeftOutIfUnread, agreement: Agreement, device: str):
        self._collectives, self._agreement, self._device = collectives, agreement, device
        self.index, self.size = agreement.ranks.index(agreement.rank), len(agreement.ranks)
        self._step: _TracedStep | None = None

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Within it, `ranks_of_caller` are these."""
        before = ranks_of_caller()
        _thread.ranks = self
        try:
            yield
        finally:
            _thread.ranks = before

    def step(self, function: Callable) -> Callable:
        """`function`, of a replica, as a step of all ranks, which trace it together."""

        @functools.wraps(function)
        def traced(*args: object, **kwargs: object) -> object:
            with self.meeting():
                if tf.executing_eagerly():
                    return function(*args, **kwargs)
                before = _step()
                self._step = _thread.step = _TracedStep(self._collectives.order, self._agreement)
                try:
                    result = function(*args, **kwargs)
                    _thread.step.finish(result)
                finally:
                    self._step = _thread.step = before
                return result

        return traced

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of the ranks' tensors of one shape; unknown to gradient tapes."""
        what = f"sum {tensor.dtype.name}{tensor.shape}"
        return self.meet(self._collectives.sum_of, tf.convert_to_tensor(tensor), what)

    def whole(self, parts: Sequence[tf.Tensor], rows: Rows) -> list[tf.Tensor]:
        """All parts of a tensor.

        Args:
            parts: of each rank, of which this one's is read; or that alone.
            rows: how they are parts of the whole.
        """
        own = parts[0] if len(parts) == 1 else parts[self.index]
        what = f"gather {own.dtype.name}{rows.whole_shape(own.shape)} of {rows}"
        flat = self.meet(self._collectives.gather_rows, tf.reshape(own, [-1]), what)
        dynamic = tf.shape(own)
        shapes = [
            [n if n is not None else dynamic[i] for i, n in enumerate(_with(own, rows.dim, size))]
            for size in rows.sizes
        ]
        lengths = [tf.reduce_prod(shape) for shape in shapes]
        pieces = tf.split(flat, tf.stack(lengths), num=len(shapes))
        return [tf.reshape(x, shape) for x, shape in zip(pieces, shapes, strict=True)]

    def meet(self, collective: Callable[..., tf.Tensor], tensor: tf.Tensor, what: str) -> tf.Tensor:
        """`collective(tensor)` in its place among those of the step, unknown to gradient tapes.

        Called by the replica, or where replicas meet, which is another thread.

        Args:
            collective: of a `LeftOutIfUnread` with the same order of calls.
            tensor: this rank's.
            what: tells the other ranks what it is.
        """
        step = None if tf.executing_eagerly() else self._step
        number = None if step is None else step.number_of_caller(what)
        with tf.device(self._device), record.stop_recording():
            result = collective(tensor, unordered=number)
        if step is None:
            return result
        step.calls.append(_Call(result.op, what))
        return result

    def is_of_stand_ins(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the step is computed of what another rank stores: nobody reads it."""
        step = None if tf.executing_eagerly() else self._step
        return step is not None and tensor.op in step.computed_of_stand_ins(tensor.graph)

    def stand_in(self, shape: Sequence[int], dtype: tf.DType, name: str) -> tf.Tensor:
        """For a part of the variable `name` that another rank stores."""
        stand_in = tf.zeros(shape, dtype)
        step = _step()
        if step is not None:
            step.stand_ins[stand_in.op] = name
        return stand_in


def is_in_step() -> bool:
    """Whether the caller traces a step of ranks, in its own graph."""
    step = _step()
    return step is not None and step.graph is tf.compat.v1.get_default_graph()


@contextlib.contextmanager
def where_ranks_exchange() -> Iterator[None]:
    """Within it, operations are made where the caller is, if ranks can exchange there, or before.

    In the step itself before a loop or a function in it, which then takes what was read before it.
    """
    step = _step()
    if step is None or step.exchanges_here():
        yield
        return
    with step.graph.as_default():
        yield


def exchange_here() -> bool:
    """Whether ranks can exchange where the caller is, not only before it."""
    step = _step()
    return step is None or step.exchanges_here()


def _step() -> "_TracedStep | None":
    """The step that the caller traces; None eagerly, also where a layer is tried meanwhile."""
    return None if tf.executing_eagerly() else getattr(_thread, "step", None)


def _with(tensor: tf.Tensor, dim: int, size: int) -> list[int | None]:
    shape = tensor.shape.as_list()
    return [*shape[:dim], size, *shape[dim + 1 :]]


class _Call(NamedTuple):
    operation: tf.Operation
    what: str


class _TracedStep:
    """A step while it is traced.

    Attributes:
        calls: collectives, in the order of the program.
        stand_ins: with the names of their variables.
        number: that TensorFlow does not know before the step runs, so that it folds no collective.
            It counts on before the first of them, and after the last.
    """

    def __init__(self, order: ResourceVariable, agreement: Agreement):
        self._order, self._agreement = order, agreement
        self.graph = tf.compat.v1.get_default_graph()
        self.calls: list[_Call] = []
        self.stand_ins: dict[tf.Operation, str] = {}
        self._of_stand_ins: dict[tf.Graph, tuple[int, set[tf.Operation]]] = {}
        self.number = self._order.assign_add(1.0, read_value=True)

    def exchanges_here(self) -> bool:
        """Whether the caller traces the step itself, or a branch of it that no gradient passes."""
        graph = tf.compat.v1.get_default_graph()
        if graph is self.graph:
            return True
        return self._branch(graph) is not None and not record.could_possibly_record()

    def number_of_caller(self, what: str) -> tf.Tensor | None:
        """`number` in the step itself; None in a branch, which runs all that it has.

        Raises:
            NotImplementedError: where `what` cannot be: in any other function within the step, and
                where a gradient would pass the branch.
        """
        if tf.compat.v1.get_default_graph() is self.graph:
            return self.number
        if not self.exchanges_here():
            raise NotImplementedError(
                "Ranks that each trace their own part exchange tensors in the step itself, and in "
                "branches of it that no gradient passes. Received: an exchange "
                f"({what}) in a loop, in a tf.function, or in a branch under a GradientTape. Leave "
                "that out, or let one process control the others (cluster_resolver=...)."
            )
        return None

    def computed_of_stand_ins(self, graph: tf.Graph) -> set[tf.Operation]:
        """The operations so far of the step, or of a branch of it, that read stand-ins."""
        count, found = self._of_stand_ins.get(graph, (0, set()))
        captured = [] if graph is self.graph else graph.captures
        outside = {x.op: taken for taken, x in captured if tf.is_symbolic_tensor(taken)}
        operations = graph.get_operations()
        for operation in operations[count:]:
            taken = outside.get(operation)
            if (
                operation in self.stand_ins
                or any(tensor.op in found for tensor in _read_by(operation))
                or (taken is not None and taken.op in self.computed_of_stand_ins(taken.graph))
            ):
                found.add(operation)
        self._of_stand_ins[graph] = len(operations), found
        return found

    def _branch(self, graph: tf.Graph) -> tf.Graph | None:
        """The branch of the step itself that `graph`, another one, is or is in; None for none."""
        while is_branch(graph) and graph.outer_graph is not self.graph:
            graph = graph.outer_graph
        return graph if is_branch(graph) else None

    def finish(self, result: object) -> None:
        """Orders what is to run for `result`, and for what changes state; all ranks call it.

        Raises:
            DisagreementError: naming the ranks whose step is another one.
            NotImplementedError: if a rank would need what another one stores.
        """
        live = self._live(result, _taken_by)
        calls = [call for call in self.calls if call.operation in live]
        refused = self._refused(self._live(result, _read_by))
        told = self._agreement.exchange("trace a step", [refused, [call.what for call in calls]])
        refusals = [text for text, _ in told if text]
        if refusals:
            raise NotImplementedError(refusals[0])
        for rank, (_, others) in zip(self._agreement.ranks, told, strict=True):
            _check_alike(self._agreement.rank, rank, [call.what for call in calls], others)
        ordered = self._in_order({call.operation for call in calls})
        for before, after in itertools.pairwise(ordered):
            run_after(after, before)
        with tf.control_dependencies(ordered[-1:]):
            self._order.assign_add(1.0, read_value=False)

    def _live(self, result: object, inputs_of: Callable) -> set[tf.Operation]:
        """What runs, in the step and in those of its branches that exchange or have stand-ins."""
        live = _ancestors(self.graph, result, inputs_of)
        made = [*(call.operation for call in self.calls), *self.stand_ins]
        for graph in {operation.graph for operation in made} - {self.graph}:
            live |= _ancestors(graph, graph.outputs, inputs_of)
        return live

    def _in_order(self, calls: set[tf.Operation]) -> list[tf.Operation]:
        """The operations of the step that are `calls`, or have a branch with some of them."""
        branches = {self._branch(call.graph) for call in calls if call.graph is not self.graph}
        names = {branch.name for branch in branches if branch is not None}
        return [
            operation
            for operation in self.graph.get_operations()
            if operation in calls
            or (names and is_stateful(operation) and names & _functions_named_by(operation))
        ]

    def _refused(self, live: set[tf.Operation]) -> str:
        """What reads a stand-in; "" for nothing."""
        for operation in live:
            for tensor in _read_by(operation):
                if tensor.op in self.stand_ins:
                    return (
                        "Ranks that each trace their own part compute a layer in parts if its rule "
                        "exchanges through its group. Received: operation "
                        f"'{operation.name}', which needs the part of '{self.stand_ins[tensor.op]}'"
                        " that another rank stores. Leave that variable out of the layout, or let "
                        "one process control the others (cluster_resolver=...). (Rank "
                        f"{self._agreement.rank} is speaking.)"
                    )
        return ""


def _check_alike(own_rank: int, rank: int, own: list[str], others: list[str]) -> None:
    pairs = itertools.zip_longest(own, others, fillvalue="nothing")
    for number, (mine, theirs) in enumerate(pairs):
        if mine != theirs:
            raise DisagreementError(
                "All ranks must trace the same step, of the same model and layout. Received: "
                f"exchange {number} is a {mine} on rank {own_rank} and a {theirs} on rank {rank}. "
                f"(Rank {own_rank} is speaking.)"
            )


def _functions_named_by(operation: tf.Operation) -> set[str]:
    """The functions that `operation` runs, such as its branches."""
    attributes = operation.node_def.attr.values()
    return {function.name for x in attributes for function in (x.func, *x.list.func)}


def _taken_by(operation: tf.Operation) -> list[tf.Tensor]:
    return list(operation.inputs)


def _read_by(operation: tf.Operation) -> list[tf.Tensor]:
    """What `operation` takes, but for what none of the branches of a `tf.cond` reads.

    An update in a branch takes all parts of a gradient into it, and reads its rank's own.
    """
    branches = branches_of(operation)
    if not branches:
        return _taken_by(operation)
    condition, *taken = operation.inputs
    read: set[int] = set()
    for branch in branches:
        live = _ancestors(branch, branch.outputs, _read_by)
        read |= {i for i, tensor in enumerate(branch.inputs) if tensor.op in live}
    return [condition, *(tensor for i, tensor in enumerate(taken) if i in read)]


def _ancestors(graph: tf.Graph, result: object, inputs_of: Callable) -> set[tf.Operation]:
    """What runs in `graph` for `result`, and for what changes state.

    Args:
        inputs_of: gives what an operation needs.
    """
    results = tf.nest.flatten(result, expand_composites=True)
    waiting = [x.op for x in results if tf.is_tensor(x) and getattr(x, "graph", None) is graph]
    waiting += [op for op in graph.get_operations() if is_stateful(op)]
    live: set[tf.Operation] = set()
    while waiting:
        operation = waiting.pop()
        if operation not in live:
            live.add(operation)
            waiting += [x.op for x in inputs_of(operation)]
            waiting += operation.control_inputs
    return live
