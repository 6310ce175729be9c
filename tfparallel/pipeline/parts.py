"""What a model is divided into: its layers, and those of the models in it, to any depth.

The parts of a functional or sequential model are the nodes of its graph, one for each call of a
layer, in the order in which Keras runs them. The parts of a subclassed model are its layers. A
model among them is opened: its own parts stand in its place. Layers that hold layers
(`TimeDistributed`, `Bidirectional`, those of the user's own) are one part.

    Trainer ── base ──┬── conv        parts   base/conv
               │      └── norm                base/norm
               head                           head

A model that a graph calls several times, each time with what the call before has made, has parts
for each call, so that these can be on different stages. Calls that do not wait for one another (two
sides of a siamese network) share their parts: each layer then runs where its variables are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras

from tfparallel.internals.keras_layers import direct_layers, functional_graph, nodes_by_depth

Calls = tuple[int, ...]  # `Member.call`s of the graphs around, outermost first


@dataclass(frozen=True)
class Part:
    """A node of a functional model, or a layer of a subclassed one.

    Attributes:
        operation: the layer, or the Keras operation, that computes it.
        node: of the functional model; None for a layer of a subclassed one.
        models: the nested models that it is in, outermost first.
        calls: by which functional models around it call them.
    """

    operation: Any
    node: Any = None
    models: tuple = ()
    calls: Calls = ()

    @property
    def name(self) -> str:
        """The path from the model that is divided: `base/conv`, or `head` at the top."""
        return "/".join(operation.name for operation in (*self.models, self.operation))

    @property
    def key(self) -> tuple[Calls, int]:
        """Tells it from all other parts of a model."""
        return self.calls, id(self.operation if self.node is None else self.node)


class Member(NamedTuple):
    """What a model itself consists of, in which models are not opened.

    Attributes:
        operation: a layer, perhaps a model, or a Keras operation.
        node: of the functional model; None in a subclassed one.
        call: tells the calls of `operation` by a graph apart; equal where they share parts.
    """

    operation: Any
    node: Any = None
    call: int | None = None

    def key(self, calls: Calls) -> tuple[Calls, int]:
        """The `Part.key` of a member that is a part, within `calls`."""
        return calls, id(self.operation if self.node is None else self.node)

    def within(self, calls: Calls) -> Calls:
        """The calls around what is in this member, a model."""
        return calls if self.call is None else (*calls, self.call)


def find_parts(model: keras.Model) -> list[Part]:
    """The parts of a built model, in the order in which they run."""
    parts: dict[tuple, Part] = {}
    _collect(model, (), (), parts)
    return list(parts.values())


def _collect(model: keras.Model, models: tuple, calls: Calls, parts: dict[tuple, Part]) -> None:
    for member in members(model):
        operation = member.operation
        if is_opened(operation):
            _collect(operation, (*models, operation), member.within(calls), parts)
        else:
            parts.setdefault(member.key(calls), Part(operation, member.node, models, calls))


def is_opened(operation: keras.Operation) -> bool:
    """Whether the parts of a member of a model take its place."""
    return isinstance(operation, keras.Model) and bool(members(operation))


def members(model: keras.Model) -> list[Member]:
    """What `model` runs, in the order in which it does."""
    graph = functional_graph(model)
    if graph is None:
        layers = direct_layers(model)
        return [Member(x) for x in layers if not isinstance(x, keras.layers.InputLayer)]
    nodes = graph_nodes(graph)
    calls = _shared_calls(nodes)
    return [Member(node.operation, node, calls[id(node)]) for node in nodes]


def graph_nodes(graph: keras.Layer) -> list:
    """The nodes of a functional model, in the order in which Keras runs them."""
    by_depth = nodes_by_depth(graph)
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in nodes if node.operation and not node.is_input]


def _shared_calls(nodes: Sequence) -> dict[int, int]:
    """For each node by its `id`, that of the first node whose call shares parts with its call.

    Calls of the same model do, where as many of its calls lie before both.
    """
    before: dict[int, dict[int, int]] = {}  # of each tensor: the calls of each model on its way
    first: dict[tuple[int, int], int] = {}
    shared = {}
    for node in nodes:
        counts = _largest(before.get(id(tensor), {}) for tensor in node.input_tensors)
        own = id(node.operation)
        shared[id(node)] = first.setdefault((own, counts.get(own, 0)), id(node))
        if isinstance(node.operation, keras.Model):
            counts[own] = counts.get(own, 0) + 1
        before.update({id(tensor): counts for tensor in node.outputs})
    return shared


def _largest(counts: Iterable[dict[int, int]]) -> dict[int, int]:
    largest: dict[int, int] = {}
    for each in counts:
        for key, count in each.items():
            largest[key] = max(count, largest.get(key, 0))
    return largest


def variables_by_part(parts: Sequence[Part]) -> list[list]:
    """For each part, its Keras variables that no part before it has.

    What belongs to a nested model itself, and to no layer of it, is with the model's first part.
    """
    counted: set[int] = set()
    owned = [_new(getattr(part.operation, "variables", ()), counted) for part in parts]
    for own, part in zip(owned, parts, strict=True):
        for model in part.models:
            own += _new(model.variables, counted)
    return owned


def _new(variables: Iterable, counted: set[int]) -> list:
    new = [variable for variable in variables if id(variable) not in counted]
    counted.update(map(id, new))
    return new
