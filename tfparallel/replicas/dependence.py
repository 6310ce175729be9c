"""What a tensor of a graph was computed from, and what is assigned."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import tensorflow as tf

from tfparallel.internals.graphs import CHOICES, called_graphs

# Beginnings of types of operations.
_ASSIGNING = "Assign", "ResourceScatter"
_LOOPS = "While", "StatelessWhile"


def reaches(value: tf.Tensor, targets: Collection[int], ends: Collection[int] = ()) -> bool:
    """Whether any of `targets`, ids of tensors, is on the way back from `value`.

    Args:
        ends: ids of tensors behind which not to look.
    """
    return Reached().reaches(value, targets, ends)


@dataclass
class Reached:
    """What searches in one graph have found so far.

    Later searches may have more targets and ends: of the tensors that searches have found to reach
    a target, and of those that they have not.

    Attributes:
        dependent: operations from which a target is on the way back.
        others: operations from which none is.
    """

    dependent: set[tf.Operation] = field(default_factory=set)
    others: set[tf.Operation] = field(default_factory=set)

    def reaches(
        self, value: tf.Tensor, targets: Collection[int], ends: Collection[int] = ()
    ) -> bool:
        """As the function `reaches`; looks at no operation again whose answer is known."""
        stack: list[tuple[tf.Tensor, tf.Operation | None]] = [(value, None)]
        taken_by: dict[tf.Operation, tf.Operation | None] = {}  # on the way
        while stack:
            tensor, taker = stack.pop()
            if id(tensor) in targets or (id(tensor) not in ends and tensor.op in self.dependent):
                while taker is not None:
                    self.dependent.add(taker)
                    taker = taken_by[taker]
                return True
            operation = tensor.op
            if id(tensor) in ends or operation in taken_by or operation in self.others:
                continue
            taken_by[operation] = taker
            stack += [(each, operation) for each in operation.inputs]
        self.others.update(taken_by)
        return False

    def forget(self) -> None:
        """Looks at all operations again."""
        self.dependent.clear()
        self.others.clear()


@dataclass(frozen=True)
class Assignment:
    """An operation that assigns a variable.

    Attributes:
        handle: the id of the variable's handle, outside of the graph.
        operation: of the graph, or of a function, a branch or a loop that the graph runs.
        depends: whether what it assigns depends on some tensors of the graph.
        is_inside: whether it is in a function, a branch or a loop.
    """

    handle: int
    operation: tf.Operation
    depends: bool
    is_inside: bool = False


def assignments(
    graph: tf.Graph, targets: Collection[int], ends: Collection[int] = ()
) -> Iterator[Assignment]:
    """What `graph` assigns to variables from outside, and whether the value reaches `targets`.

    What a branch or a loop assigns depends on what decides whether it runs, too.

    Args:
        targets, ends: as `reaches` takes them.
    """
    handles = {id(inner): id(outer) for outer, inner in graph.captures}
    yield from _assignments_in(graph, handles, set(targets), ends, False)


def _assignments_in(
    graph: tf.Graph,
    handles: Mapping[int, int],
    targets: set[int],
    ends: Collection[int],
    is_decided: bool,
    is_inside: bool = False,
) -> Iterator[Assignment]:
    for operation in graph.get_operations():
        if operation.type.startswith(_ASSIGNING):
            resource, *values = operation.inputs
            if id(resource) in handles:
                depends = is_decided or any(reaches(x, targets, ends) for x in values)
                yield Assignment(handles[id(resource)], operation, depends, is_inside)
            continue
        for inner, given in called_graphs(operation):
            pairs = list(zip(inner.inputs, given, strict=True))
            known = {id(x): handles[id(y)] for x, y in pairs if id(y) in handles}
            if not known or not _assigns(inner):
                continue
            own = {id(x) for x, y in pairs if reaches(y, targets, ends)}
            if operation.type in _LOOPS:
                _carry_around(inner, own, ends)
            decides = operation.inputs[0] if operation.type in CHOICES else None
            decided = decides is not None and reaches(decides, targets, ends)
            # How often a loop runs may depend on whatever goes around in it.
            decided = decided or (operation.type in _LOOPS and bool(own))
            yield from _assignments_in(inner, known, own, ends, is_decided or decided, True)


def _assigns(graph: tf.Graph) -> bool:
    """Whether `graph`, or what it calls, has an assignment."""
    return any(
        operation.type.startswith(_ASSIGNING)
        or any(_assigns(inner) for inner, _ in called_graphs(operation))
        for operation in graph.get_operations()
    )


def _carry_around(body: tf.Graph, dependent: set[int], ends: Collection[int]) -> None:
    """Adds to `dependent`, inputs of a loop's body, those that become so when it has run."""
    size = -1
    while size != len(dependent):
        size = len(dependent)
        for given, made in zip(body.inputs, body.outputs, strict=False):
            if reaches(made, dependent, ends):
                dependent.add(id(given))
