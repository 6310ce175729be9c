"""Which stage each part of a model belongs to.

A part runs on the stage it is given, or on a later one if what it needs is made there; so a layer
that is called on several stages has one home, the first of them, where its variables live.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras

from tfparallel.internals.keras_layers import functional_graph
from tfparallel.pipeline.memory import parameter_bytes
from tfparallel.pipeline.parts import (
    Calls,
    Member,
    Part,
    find_parts,
    is_opened,
    members,
    variables_by_part,
)
from tfparallel.pipeline.plans.partition import balanced_cuts, match_patterns
from tfparallel.pipeline.profile import Cost, profile_parts
from tfparallel.pipeline.stage_scope import Placement, check_no_stage_is_empty

ChooseDevices = Callable[[Sequence[Cost], Sequence[int]], "Budget"]
Partition = str | Sequence[Sequence[str]]  # "balanced", or patterns of layer names for each stage


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
        owned = zip(variables_by_part(self.parts), self.stage_of, strict=True)
        return {id(variable): stage for own, stage in owned for variable in own}


@dataclass(frozen=True)
class Budget:
    """What a stage may hold, and of what it holds several.

    Attributes:
        live: how many microbatches each stage holds at once.
        limit: bytes of a stage; None is no limit.
        num_devices: of each stage, which take microbatches in turn; None for one each.
    """

    live: Sequence[int]
    limit: float | None = None
    num_devices: Sequence[int] | None = None


def divide(
    model: keras.Model,
    partition: Partition,
    placement: Placement,
    budget: Budget,
    devices: Sequence[str],
    inputs: object = None,
    agreed: Callable[[list[Cost]], list[Cost]] = list,
    choose: ChooseDevices | None = None,
) -> Stages:
    """Decides on which stage each part of `model` runs.

    Args:
        model: built.
        partition: "balanced" measures the parts and makes the slowest stage as fast as can be; or
            for every stage a list of shell-style patterns of layer names.
        placement: layers that the user has put on stages.
        budget: of each stage's memory.
        devices: of each stage, on which parts are measured, and what it takes to send.
        inputs: of one microbatch, to measure with; see `profile_parts`.
        agreed: gives the costs that all workers divide by, of those that this one measured.
        choose: gives the stages their devices, and the budget that is then; None where they have
            them. Given the costs of the parts, and the bytes of their variables.

    Raises:
        ValueError: if there are fewer parts than stages, if patterns do not fit the layers, if a
            stage would be empty, or if no division is within the limit.
    """
    parts, num_stages = find_parts(model), len(budget.live)
    if num_stages > len(parts):
        raise ValueError(
            f"Every stage must have a layer. Received: {num_stages} stages for model "
            f"'{model.name}' of {len(parts)} layers. Use at most {len(parts)} stages (devices)."
        )
    is_placed = placement.places(parts)
    if partition == "balanced" and not is_placed:
        costs = agreed(profile_parts(model, parts, inputs, devices))
        of_variables = [parameter_bytes(own) for own in variables_by_part(parts)]
        budget = budget if choose is None else choose(costs, of_variables)
        return _balanced(parts, costs, of_variables, budget)
    if choose is not None:
        raise ValueError(
            "Layers and devices of stages are chosen together, of layers that are measured. "
            f"Received: num_stages={num_stages} beside layers that are placed by the user. Leave "
            "num_stages out and give the devices of each stage, or place no layers."
        )
    if partition != "balanced" and is_placed:
        raise ValueError(
            "Layers are placed either by patterns or by `with strategy.stage(i):`. Received: "
            f"both, partition={partition!r}. Leave the partition out."
        )
    given = placement.stages(parts) if is_placed else _matched(parts, partition, num_stages)
    keys = [part.key for part in parts]
    moved = _after_producers(model, dict(zip(keys, given, strict=True)))
    stage_of = [moved[key] for key in keys]
    check_no_stage_is_empty(stage_of, num_stages, model.name)
    return Stages(parts, stage_of)


def measured(
    model: keras.Model,
    stages: Stages,
    devices: Sequence[str],
    inputs: object,
    agreed: Callable[[list[Cost]], list[Cost]],
) -> Stages:
    """The same, with what each part takes, which dividing by patterns need not know.

    Args:
        model: that is divided.
        stages: of it.
        devices, inputs, agreed: as in `divide`.
    """
    costs = agreed(profile_parts(model, stages.parts, inputs, devices))
    return _with_costs(stages.parts, stages.stage_of, costs)


def _matched(parts: Sequence[Part], partition: Partition, num_stages: int) -> list[int]:
    if isinstance(partition, str) or len(partition) != num_stages:
        raise ValueError(
            "The partition must be 'balanced' or lists of patterns of layer names for "
            f"{num_stages} stages. Received: {partition!r}."
        )
    names = list(dict.fromkeys(part.name for part in parts))
    stages = dict(zip(names, match_patterns(names, partition), strict=True))
    return [stages[part.name] for part in parts]


def _balanced(
    parts: Sequence[Part], costs: Sequence[Cost], of_variables: Sequence[int], budget: Budget
) -> Stages:
    memory = [
        [own + live * cost.activation_bytes for own, cost in zip(of_variables, costs, strict=True)]
        for live in budget.live
    ]
    runs = balanced_cuts(
        [cost.time for cost in costs],
        len(budget.live),
        memory=memory,
        memory_limit=budget.limit,
        boundary_costs=[cost.sending_time for cost in costs[:-1]],
        layer_names=[part.name for part in parts],
        num_devices=budget.num_devices,
    )
    return _with_costs(parts, [stage for stage, run in enumerate(runs) for _ in run], costs)


def _with_costs(parts: Sequence[Part], stage_of: Sequence[int], costs: Sequence[Cost]) -> Stages:
    total = sum(cost.time for cost in costs) or 1.0  # a model may call no layer
    times, activations = [c.time / total for c in costs], [c.activation_bytes for c in costs]
    return Stages(parts, stage_of, times, activations)


def _after_producers(model: keras.Model, stage_of: dict[tuple, int]) -> dict[tuple, int]:
    """Moves every part behind the parts whose results it takes; stages are by `Part.key`."""
    _follow(model, (), [0], stage_of)
    return stage_of


def _follow(
    model: keras.Model, calls: Calls, made_on: Sequence[int], stage_of: dict[tuple, int]
) -> list[int]:
    """Moves the parts of a model whose inputs are made on these stages; gives its outputs'.

    Of what a subclassed model does with its inputs nothing is known: all comes behind all of them.
    """
    graph, latest = functional_graph(model), max(made_on)
    if graph is None:
        moved = [_moved(each, calls, [latest], stage_of) for each in members(model)]
        return [max(itertools.chain(*moved))]
    if len(made_on) != len(graph.inputs):
        made_on = [latest] * len(graph.inputs)
    made = dict(zip(map(id, graph.inputs), made_on, strict=True))
    for member in members(model):
        needed = [made.get(id(tensor), 0) for tensor in member.node.input_tensors] or [0]
        outputs = _moved(member, calls, needed, stage_of)
        if len(outputs) != len(member.node.outputs):
            outputs = [max(outputs)] * len(member.node.outputs)
        made.update(zip(map(id, member.node.outputs), outputs, strict=True))
    return [made[id(tensor)] for tensor in graph.outputs]


def _moved(
    member: Member, calls: Calls, needed: Sequence[int], stage_of: dict[tuple, int]
) -> list[int]:
    """Moves a part, or the parts of a model, behind `needed`; gives the stages of the outputs."""
    if is_opened(member.operation):
        return _follow(member.operation, member.within(calls), needed, stage_of)
    key = member.key(calls)
    stage_of[key] = max(stage_of[key], *needed)
    return [stage_of[key]]
