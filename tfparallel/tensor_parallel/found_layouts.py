"""`layout="auto"`: the layout that is found in a model, and its weights put in parts by it.

A model's weights are made before all of its layers are there. They are whole until the model is
used, or asked for its `summary`; then its calls are looked at, and weights and optimizer slots are
made again in parts.
"""

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import keras
import tensorflow as tf

from tfparallel.internals.keras_layers import (
    behind,
    direct_layers,
    inputs_structure,
    layers_of,
    own_variables,
    set_behind,
)
from tfparallel.replicas.variables import ReplicatedVariable
from tfparallel.tensor_parallel.blocks import blocks_of
from tfparallel.tensor_parallel.computing_groups import ComputingGroups
from tfparallel.tensor_parallel.layer_calls import LayerCall, ModelCalls, calls_of
from tfparallel.tensor_parallel.layer_rules import hook_layer
from tfparallel.tensor_parallel.layouts import Layouts, VariableLayout
from tfparallel.tensor_parallel.pairing import Call, Decision, decisions
from tfparallel.tensor_parallel.rows import Rows, even_rows, even_sizes
from tfparallel.tensor_parallel.rules.elementwise_layers import keeps_parts
from tfparallel.tensor_parallel.split_variable import split_of

_log = logging.getLogger("tfparallel")
Found: TypeAlias = Rows | str  # how a weight is in parts, or why it is whole
_NOT_YET = "its model has not been used yet"


@dataclass
class FoundLayouts(Layouts):
    """Layouts that models get when they are first used.

    Attributes:
        looked_at: the models that have theirs.
        slots: of optimizers, each with the variable of TensorFlow that it is for; weak references.
    """

    looked_at: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    slots: list[tuple[weakref.ref, weakref.ref]] = field(default_factory=list)
    _warned: bool = False

    def _rows(
        self, path: str, shape: tuple, trainable: bool, blocks: int
    ) -> tuple[Rows | None, str]:
        del path, shape, blocks
        return None, _NOT_YET if trainable else "it is not trainable: each replica assigns it"

    def find(
        self, extended: ComputingGroups, model: keras.Model, calls: ModelCalls
    ) -> dict[int, Found]:
        """How the weights of `model` are to be kept, by `id`; what is not in it stays whole."""
        del extended, model
        parts = self.groups.parts
        borders = [id(x) for x in calls.borders]
        by_layer = decisions([as_call(call) for call in calls.calls], borders, parts)
        found: dict[int, Found] = {}
        for call in calls.calls:
            decision = by_layer.get(call.layer)
            if decision is not None:
                found |= _rows_of(call, decision, parts)
        return found

    def check_patterns(self, model: keras.Model) -> None:
        """There are none."""
        del model

    def add_slot(self, leader: object, slot: keras.Variable) -> None:
        """Notes that an optimizer makes `slot` for the weight `leader`, of equal shape."""
        self.slots.append((weakref.ref(leader), weakref.ref(slot)))

    def slots_of(self, leader: object) -> list:
        """The slots of a weight that live."""
        slots = [slot() for variable, slot in self.slots if variable() is leader]
        return [slot for slot in slots if slot is not None]

    def warn_of_custom_step(self) -> None:
        """Says once that weights of a model that no one has looked at stay whole."""
        whole = [p.path for p in self.placements.values() if p.reason == _NOT_YET]
        if whole and not self._warned:
            self._warned = True
            _log.warning(
                "A step of your own runs before layout='auto' has seen its model: its weights stay "
                "whole. Call strategy.summary(model, batch) before. Weights: %s",
                ", ".join(whole[:3]) + (", ..." if len(whole) > 3 else ""),
            )


class PutsInParts(ComputingGroups, Protocol):
    """What laying out a model asks of the strategy; `HoldsParts` answers."""

    @property
    def layouts(self) -> FoundLayouts:
        """Those that are found."""

    def in_parts(
        self, variable: keras.Variable, rows: Rows, leader: tf.Variable | None = None
    ) -> tf.Variable:
        """What keeps the value of `variable` in parts; called outside of replicas."""


def lay_out(strategy: tf.distribute.Strategy, model: keras.Model, inputs: object = None) -> None:
    """Puts a model's weights in parts, once. Called outside of replicas.

    Args:
        strategy: whose extended has `layouts`, which are `FoundLayouts`, and `in_parts`.
        model: of this strategy.
        inputs: a batch of what it is called with, or specs of one; a functional model needs none.

    Raises:
        ValueError: for a model of another kind without `inputs`.
    """
    layouts: FoundLayouts = strategy.extended.layouts
    if model in layouts.looked_at:
        return
    with tf.init_scope():
        for each in _models_that_are_called(model):
            _build(strategy, each, inputs)
            _place(strategy.extended, each, None if inputs_structure(each) is not None else inputs)
            layouts.hook(each, strategy.extended)
    layouts.looked_at.add(model)


def _models_that_are_called(model: keras.Model) -> list:
    """The model itself; those in it, where it has a step of its own and no `call` (a GAN)."""
    if type(model).call is not keras.Model.call:
        return [model]
    return [each for each in direct_layers(model) if isinstance(each, keras.Model)]


def _build(strategy: tf.distribute.Strategy, model: keras.Model, inputs: object) -> None:
    """Makes the variables of a model that gets them from its first batch."""
    if not model.built and inputs is not None:
        with strategy.scope():
            model(keras.tree.map_structure(_symbolic, inputs))


def _symbolic(tensor: tf.Tensor) -> keras.KerasTensor:
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras.KerasTensor((None, *tensor.shape[1:]), dtype)


def _place(extended: PutsInParts, model: keras.Model, inputs: object) -> None:
    found = extended.layouts.find(extended, model, calls_of(model, inputs))
    for layer in layers_of(model):
        for variable in own_variables(layer):
            _place_variable(extended, layer, variable, found)


def as_call(call: LayerCall) -> Call:
    """A call as what decides sees it: tensors are numbers."""
    cuts = call.cuts
    ways = {} if cuts is None else cuts.ways
    return Call(
        call.layer,
        tuple(id(x) for x in call.inputs),
        tuple(id(x) for x in call.outputs),
        {name: cut.size for name, cut in ways.items()},
        {name: cut.tensor_dim for name, cut in ways.items()},
        0 if cuts is None else cuts.flops,
        keeps_parts(call.layer),
    )


def _rows_of(call: LayerCall, decision: Decision, parts: int) -> dict[int, Found]:
    """How each weight of a layer is kept, by `id`."""
    ways = call.cuts.ways  # type: ignore[union-attr]
    if not decision.way:
        return {id(weight): decision.reason for cut in ways.values() for weight, _ in cut.dims}
    holders = {id(w): layer for layer in layers_of(call.layer) for w in own_variables(layer)}
    rows: dict[int, Found] = {}
    cut = ways[decision.way]
    for weight, dim in cut.dims:
        total = weight.shape[dim]
        is_last = dim == len(weight.shape) - 1
        if decision.way == "heads" and total % cut.size == 0:  # queries are where their keys are
            sizes = even_sizes(cut.size, parts)
            rows[id(weight)] = Rows(dim, tuple(total // cut.size * size for size in sizes))
            continue
        blocks = blocks_of(holders[id(weight)]) if is_last else 1
        rows[id(weight)] = even_rows(dim, total, parts, blocks)
    return rows


def _place_variable(
    extended: PutsInParts, layer: keras.Layer, variable: keras.Variable, found: Mapping[int, Found]
) -> None:
    layouts: FoundLayouts = extended.layouts
    if split_of(variable) is not None or not isinstance(behind(variable), ReplicatedVariable):
        return
    known = layouts.placements.get(variable.path)
    shape = tuple(variable.shape)
    rows = found.get(id(variable), "it multiplies nothing")
    if known is not None and known.reason != _NOT_YET:
        return
    if isinstance(rows, str):
        layouts.placements[variable.path] = VariableLayout(variable.path, shape, None, rows)
        return
    slots = layouts.slots_of(behind(variable))
    set_behind(variable, extended.in_parts(variable, rows))
    for slot in slots:
        set_behind(slot, extended.in_parts(slot, rows, behind(variable)))
    hook_layer(layer, extended)
    layouts.placements[variable.path] = VariableLayout(variable.path, shape, rows)
