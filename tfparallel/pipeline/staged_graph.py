"""A functional model whose nodes run stage by stage."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfparallel.internals import Functional
from tfparallel.internals.keras_layers import operation_of_node, outputs_structure
from tfparallel.pipeline.graph_groups import Item, group_items
from tfparallel.pipeline.masks import MasksInOrder
from tfparallel.pipeline.parts import Calls, Member, is_opened, members
from tfparallel.pipeline.places import Places
from tfparallel.pipeline.stage_calls import StageCalls
from tfparallel.replicas.all_rows import RowsNeededInFunctionError


class StagedGraph:
    """Runs the nodes of a functional model, those of one stage together.

    Args:
        graph: the functional model.
        model: that runs it.
    """

    def __init__(self, graph: Functional, model: keras.Model, places: Places, calls: StageCalls):
        self._graph, self._places, self._calls = graph, places, calls
        self._members = members(model)
        self._groups: dict[Calls, list[NodeGroup]] = {}
        self._masks: dict[Calls, MasksInOrder] = {}
        self._gathering: set[int] = set()  # members that need the rows of all microbatches

    def run(
        self,
        original: Callable,
        inputs: object,
        operation_fn: Callable | None = None,
        call_fn: Callable | None = None,
    ) -> object:
        """`Functional._run_through_graph`."""
        options = {} if operation_fn is None else {"operation_fn": operation_fn}
        is_staged = self._calls.is_in_step or self._calls.is_in_part
        if call_fn is not None or not is_staged:
            return original(inputs, call_fn=call_fn, **options)
        flat = keras.tree.flatten(inputs)
        tensors: dict[Hashable, tf.Tensor] = dict(
            zip(map(id, self._graph.inputs), flat, strict=True)
        )
        around = self._calls.around
        if around not in self._groups:
            self._groups[around] = self._grouped(around)
            self._masks[around] = MasksInOrder(self._members)
        groups, at = self._groups[around], 0
        while at < len(groups):
            try:
                self._run(groups[at], operation_fn, tensors)
                at += 1
            except RowsNeededInFunctionError:
                chosen = groups[at].chosen
                if groups[at].stage is None or self._calls.is_in_part or len(chosen) == 1:
                    raise
                # What gathers rows is a group of its own, which microbatches call as it is.
                runs = itertools.groupby(chosen, lambda i: i if i in self._gathering else None)
                items = self._items(around)
                groups[at : at + 1] = [self._group([*run], items) for _, run in runs]
        self._masks[around].end(tensors)
        outputs = [tensors[id(x)] for x in self._graph.outputs]
        return keras.tree.pack_sequence_as(outputs_structure(self._graph), outputs)

    def _run(
        self, group: "NodeGroup", operation_fn: Callable | None, tensors: dict[Hashable, tf.Tensor]
    ) -> None:
        if group.stage is None or self._calls.is_in_part:
            self._run_members(group, operation_fn, tensors)
            return
        outputs = self._calls.call(
            group.stage,
            (id(self._graph), self._calls.around, group.chosen),
            [self._members[i].operation for i in group.chosen],
            functools.partial(self._run_group, group, operation_fn),
            [tensors[key] for key in group.needed],
        )
        tensors.update(zip(group.produced, outputs, strict=True))

    def _items(self, around: Calls) -> list[Item]:
        return [
            Item(
                self._places.stages(member, around),
                [id(x) for x in member.node.input_tensors],
                [id(x) for x in member.node.outputs],
            )
            for member in self._members
        ]

    def _grouped(self, around: Calls) -> list["NodeGroup"]:
        items = self._items(around)
        found = group_items(items, map(id, self._graph.inputs))
        return [self._group(chosen, items) for chosen in found]

    def _group(self, chosen: Sequence[int], items: Sequence[Item]) -> "NodeGroup":
        others = [item for i, item in enumerate(items) if i not in chosen]
        wanted = {id(x) for x in self._graph.outputs}.union(*(each.takes for each in others))
        made = dict.fromkeys(key for i in chosen for key in items[i].makes)
        needed = dict.fromkeys(key for i in chosen for key in items[i].takes)
        stages = {stage for i in chosen for stage in items[i].stages}
        return NodeGroup(
            next(iter(stages)) if len(stages) == 1 else None,
            tuple(chosen),
            [key for key in needed if key not in made],
            [key for key in made if key in wanted],
        )

    def _run_group(self, group: "NodeGroup", operation_fn: Callable | None, inputs: list) -> list:
        tensors = dict(zip(group.needed, inputs, strict=True))
        self._run_members(group, operation_fn, tensors)
        return [tensors[key] for key in group.produced]

    def _run_members(
        self, group: "NodeGroup", operation_fn: Callable | None, tensors: dict[Hashable, tf.Tensor]
    ) -> None:
        around = self._calls.around
        masks = self._masks[around]
        for i in group.chosen:
            member = self._members[i]
            args, kwargs = member.node.arguments.fill_in(tensors)
            operation = operation_of_node(self._graph, member.node)
            operation = operation if operation_fn is None else operation_fn(operation)
            try:
                with (
                    self._calls.entered(member.within(around)),
                    self._named(member, around),
                    masks.seen_by(i, tensors),
                ):
                    outputs = keras.tree.flatten(operation(*args, **kwargs))
            except RowsNeededInFunctionError:
                self._gathering.add(i)
                raise
            made: dict[Hashable, tf.Tensor] = dict(
                zip(map(id, member.node.outputs), outputs, strict=True)
            )
            masks.made(i, tensors, made)
            tensors.update(made)

    def _named(self, member: Member, around: Calls) -> contextlib.AbstractContextManager:
        if is_opened(member.operation):  # its parts have names
            return contextlib.nullcontext()
        part, stage = self._places.find(member.operation, member.key(around))
        return self._calls.traced(stage, part.name)


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of a graph that run together.

    Attributes:
        stage: on which they run; None for a nested model on several stages.
        chosen: their numbers, in their order.
        needed: `id`s of the tensors that they take from others.
        produced: `id`s of the tensors that others take from them.
    """

    stage: int | None
    chosen: tuple[int, ...]
    needed: Sequence[Hashable]
    produced: Sequence[Hashable]
