"""Which stage each part of a model belongs to.

The parts of a functional or sequential model are the nodes of its graph, one for each call of a
layer, in the order in which Keras runs them. The parts of a subclassed model are its layers. A part
runs on the stage it is given, or on a later one if what it needs is made there; so a layer that is
called on several stages has one home, the first of them, where its variables live.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfparallel.pipeline.memory import parameter_bytes
from tfparallel.pipeline.partition import balanced_cuts, match_patterns
from tfparallel.pipeline.placement import Placement, check_no_stage_is_empty
from tfparallel.pipeline.profile import Cost, profile_parts
from tfparallel.tf_internals import Functional

Partition = str | Sequence[Sequence[str]]  # "balanced", or patterns of layer names for each stage


@dataclass(frozen=True)
class Part:
    """A node of a functional model, or a layer of a subclassed one.

    Attributes:
        operation: the layer, or the Keras operation, that computes it.
        node: of the functional model; None for a layer of a subclassed one.
    """

    operation: Any
    node: Any = None

    @property
    def name(self) -> str:
        return self.operation.name


@dataclass(frozen=True)
class Stages:
    """A model's parts with their stages.

    Attributes:
        parts: in the order in which they run.
        stage_of: the stage of each part.
        time_shares: of each part, its measured share of the model's time; None if not measured.
        activation_bytes: of each part's outputs for one microbatch; None if not measured.
    """

    parts: Sequence[Part]
    stage_of: Sequence[int]
    time_shares: Sequence[float] | None = None
    activation_bytes: Sequence[int] | None = None

    def homes(self) -> dict[int, int]:
        """The first stage of every variable, by `id` of the Keras variable."""
        homes: dict[int, int] = {}
        for part, stage in zip(self.parts, self.stage_of, strict=True):
            for variable in getattr(part.operation, "variables", ()):
                homes.setdefault(id(variable), stage)
        return homes


def functional_graph(model: keras.Model) -> Any:
    """The functional model whose graph `model` runs, or None for a subclassed model."""
    if isinstance(model, keras.Sequential):
        return model._functional
    overrides_call = type(model).call is not Functional.call
    return model if isinstance(model, Functional) and not overrides_call else None


@dataclass(frozen=True)
class Budget:
    """What a stage may hold, and of what it holds several.

    Attributes:
        live: how many microbatches each stage holds at once.
        limit: bytes of a stage; None is no limit.
    """

    live: Sequence[int]
    limit: float | None = None


def divide(
    model: keras.Model,
    partition: Partition,
    placement: Placement,
    budget: Budget,
    inputs: Any = None,
) -> Stages:
    """Decides on which stage each part of `model` runs.

    Args:
        model: built.
        partition: "balanced" measures the parts and makes the slowest stage as fast as can be; or
            for every stage a list of shell-style patterns of layer names.
        placement: layers that the user has put on stages.
        budget: of each stage's memory.
        inputs: of one microbatch, to measure with; see `profile_parts`.

    Raises:
        ValueError: if there are fewer parts than stages, if patterns do not fit the layers, if a
            stage would be empty, or if no division is within the limit.
    """
    graph, num_stages = functional_graph(model), len(budget.live)
    parts = _nodes(graph) if graph is not None else _layers(model)
    if num_stages > len(parts):
        raise ValueError(
            f"Every stage must have a layer. Received: {num_stages} stages for model "
            f"'{model.name}' of {len(parts)} layers. Use fewer stages (devices)."
        )
    is_placed = placement.places(parts)
    if partition == "balanced" and not is_placed:
        return _balanced(parts, profile_parts(model, graph, parts, inputs), budget)
    if partition != "balanced" and is_placed:
        raise ValueError(
            "Layers are placed either by patterns or by `with strategy.stage(i):`. Received: "
            f"both, partition={partition!r}. Leave the partition out."
        )
    stage_of = placement.stages(parts) if is_placed else _matched(parts, partition, num_stages)
    stage_of = _after_producers(parts, stage_of)
    check_no_stage_is_empty(stage_of, num_stages, model.name)
    return Stages(parts, stage_of)


def _matched(parts: Sequence[Part], partition: Partition, num_stages: int) -> list[int]:
    if isinstance(partition, str) or len(partition) != num_stages:
        raise ValueError(
            "The partition must be 'balanced' or lists of patterns of layer names for "
            f"{num_stages} stages. Received: {partition!r}."
        )
    names = list(dict.fromkeys(part.name for part in parts))
    stages = dict(zip(names, match_patterns(names, partition), strict=True))
    return [stages[part.name] for part in parts]


def _balanced(parts: Sequence[Part], costs: Sequence[Cost], budget: Budget) -> Stages:
    counted: set[int] = set()
    of_variables = []
    for part in parts:  # shared variables live with the first part that has them
        variables = [v for v in getattr(part.operation, "variables", ()) if id(v) not in counted]
        counted.update(map(id, variables))
        of_variables.append(parameter_bytes(variables))
    memory = [
        [own + live * cost.activation_bytes for own, cost in zip(of_variables, costs, strict=True)]
        for live in budget.live
    ]
    runs = balanced_cuts(
        [cost.time for cost in costs],
        len(budget.live),
        memory=memory,
        memory_limit=budget.limit,
        layer_names=[part.name for part in parts],
    )
    total = sum(cost.time for cost in costs)
    return Stages(
        parts,
        [stage for stage, run in enumerate(runs) for _ in run],
        [cost.time / total for cost in costs],
        [cost.activation_bytes for cost in costs],
    )


def _nodes(graph: Any) -> list[Part]:
    depths = sorted(graph._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in graph._nodes_by_depth[depth]]
    return [Part(node.operation, node) for node in nodes if node.operation and not node.is_input]


def _layers(model: keras.Model) -> list[Part]:
    layers = model._flatten_layers(include_self=False, recursive=False)
    return [Part(layer) for layer in layers if not isinstance(layer, keras.layers.InputLayer)]


def _after_producers(parts: Sequence[Part], stage_of: list[int]) -> list[int]:
    """Moves every node behind the nodes whose results it takes."""
    made_on: dict[int, int] = {}
    for i, part in enumerate(parts):
        if part.node is None:
            continue
        needed = [made_on.get(id(tensor), 0) for tensor in part.node.input_tensors]
        stage_of[i] = max([stage_of[i], *needed])
        made_on.update({id(tensor): stage_of[i] for tensor in part.node.outputs})
    return stage_of
