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

from tfparallel.pipeline.partition import balanced_cuts, match_patterns
from tfparallel.pipeline.profile import profile_parts
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
    """

    parts: Sequence[Part]
    stage_of: Sequence[int]
    time_shares: Sequence[float] | None = None

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


def divide(model: keras.Model, partition: Partition, num_stages: int) -> Stages:
    """Decides on which stage each part of `model` runs.

    Args:
        model: built.
        partition: "balanced" measures the parts and makes the slowest stage as fast as can be; or
            for every stage a list of shell-style patterns of layer names.
        num_stages: how many stages.

    Raises:
        ValueError: if there are fewer parts than stages, or patterns do not fit the layers.
    """
    graph = functional_graph(model)
    parts = _nodes(graph) if graph is not None else _layers(model)
    if num_stages > len(parts):
        raise ValueError(
            f"Every stage must have a layer. Received: {num_stages} stages for model "
            f"'{model.name}' of {len(parts)} layers. Use fewer stages (devices)."
        )
    if partition != "balanced":
        if isinstance(partition, str) or len(partition) != num_stages:
            raise ValueError(
                "The partition must be 'balanced' or lists of patterns of layer names for "
                f"{num_stages} stages. Received: {partition!r}."
            )
        names = list(dict.fromkeys(part.name for part in parts))
        stages = dict(zip(names, match_patterns(names, partition), strict=True))
        return Stages(parts, _after_producers(parts, [stages[part.name] for part in parts]))
    costs = profile_parts(graph, parts)
    runs = balanced_cuts(costs, num_stages, layer_names=[part.name for part in parts])
    stage_of = [stage for stage, run in enumerate(runs) for _ in run]
    return Stages(parts, stage_of, [cost / sum(costs) for cost in costs])


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
