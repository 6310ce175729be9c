"""A table of what a training step takes of each device, before it runs."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from tfparallel.internals.keras_layers import behind, layers_of
from tfparallel.replicas.local_copies import first_copy
from tfparallel.replicas.optimizer_hooks import build_optimizer
from tfparallel.segments.kept_activations import kept_bytes
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.sharded_variables import KeptWholeVariable, ShardedVariable
from tfparallel.sharded.units import UnitWeights, unit_variables

_WIDTH = 100  # of a table that is made into text


class DeviceMemory(NamedTuple):
    """What a step takes of one device, in bytes.

    Attributes:
        device: its name.
        parameters: of weights and other state of layers that it stores.
        slots: of the optimizer's variables that it stores.
        gradients: that there are at the end of the backward pass, and the largest unit's whole one.
        gathered: of weights that are there in whole at a time.
        activations: that the backward pass takes of the forward pass; None if not known.
    """

    device: str
    parameters: int
    slots: int
    gradients: int
    gathered: int
    activations: int | None

    @property
    def total(self) -> int:
        """All of them; without activations where they are not known."""
        return sum(size or 0 for size in self[1:])


@dataclasses.dataclass(frozen=True)
class MemoryTable:
    """The devices of this process; `print` it.

    Attributes:
        model_name: of the model.
        devices: one for each, and one for the host, "host", where it keeps parts.
    """

    model_name: str
    devices: tuple[DeviceMemory, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=f"Bytes that a step of model '{self.model_name}' takes of a device")
        table.add_column("device", overflow="fold")
        for heading in (*DeviceMemory._fields[1:], "total"):
            table.add_column(heading, justify="right")
        for row in self.devices:
            sizes = (*row[1:], row.total)
            table.add_row(row.device, *("-" if n is None else f"{n:,}" for n in sizes))
        yield table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH, color_system=None).print(self)
        return text.getvalue()


def memory_table(
    extended: ShardedExtended, model: keras.Model, inputs: object = None
) -> MemoryTable:
    """The table of `model`, on the devices of this process.

    Args:
        extended: of the strategy.
        model: built.
        inputs: a batch of what it is called with, of all replicas.

    Raises:
        ValueError: if it is not built.
    """
    if not model.built:
        raise ValueError(
            f"Expected a model that is built, whose weights are known. Received: '{model.name}', "
            "which is not. Call it on a batch, or give it an Input, in the strategy's scope."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        build_optimizer(optimizer, model.trainable_variables)
    slots = [] if optimizer is None else optimizer.variables
    gradients, gathered = _gradients(extended, model, optimizer), _gathered(extended, model)
    activations = None if inputs is None else _activations(extended, model, inputs)
    devices = extended.worker_devices
    names = [name.rpartition("device:")[2] for name in devices]
    rows = [
        DeviceMemory(
            name,
            _stored(model.variables, i, on_host=False),
            _stored(slots, i, on_host=False),
            gradients,
            gathered,
            activations,
        )
        for i, name in enumerate(names)
    ]
    if extended.sharding.host is not None:
        rows.append(_of_host(model.variables, slots, len(devices)))
    return MemoryTable(model.name, tuple(rows))


def _of_host(weights: Sequence[object], slots: Sequence[object], count: int) -> DeviceMemory:
    """What the replicas of this process keep in its host's memory."""
    parameters, in_slots = (
        sum(_stored(each, i, on_host=True) for i in range(count)) for each in (weights, slots)
    )
    return DeviceMemory("host", parameters, in_slots, 0, 0, 0)


def _stored(variables: Sequence[object], i: int, on_host: bool) -> int:
    """Bytes of what replica `i` of this process has on its device, or on the host."""
    return sum(
        _size(own.shape, own.dtype)
        for own, is_there in (_own(behind(variable), i) for variable in variables)
        if is_there == on_host
    )


def _own(variable: object, i: int) -> tuple[tf.Variable, bool]:
    """What replica `i` has of a variable, and whether it is kept on the host."""
    copies = getattr(variable, "values", None)
    is_on_host = isinstance(variable, ShardedVariable) and variable.is_on_host
    return (variable if copies is None else copies[i]), is_on_host


def _size(shape: object, dtype: object) -> int:
    return int(tf.TensorShape(shape).num_elements() or 0) * tf.as_dtype(dtype).size


def _gradients(extended: ShardedExtended, model: keras.Model, optimizer: keras.Optimizer) -> int:
    """Parts where they are reduced as soon as they are there, else wholes."""
    variables = [behind(variable) for variable in model.trainable_variables]
    if optimizer is None:
        return 0
    if not extended.reduces_early(optimizer, model.trainable_variables):
        return sum(_size(v.shape, v.dtype) for v in variables)
    units = [[v for v in unit if v.trainable] for unit in _units(extended, model)]
    largest = max((sum(_size(v.shape, v.dtype) for v in unit) for unit in units), default=0)
    return largest + sum(
        _size([v.shards.length] if isinstance(v, ShardedVariable) else v.shape, v.dtype)
        for v in variables
    )


def _gathered(extended: ShardedExtended, model: keras.Model) -> int:
    """What is whole at once: units one behind the other, and all that is in no unit."""
    sharding = extended.sharding
    units = [[v for v in unit if _is_gathered(v)] for unit in _units(extended, model)]
    sizes = [sum(_size(v.shape, v.dtype) for v in unit) for unit in units if unit]
    in_units = {id(v) for unit in units for v in unit}
    every = {id(behind(v)): behind(v) for v in model.trainable_variables}
    rest = [v for key, v in every.items() if _is_gathered(v) and key not in in_units]
    count = 1 + sharding.prefetch if sharding.reshard_after_forward else len(sizes)
    at_once = [sum(sizes[k : k + count]) for k in range(len(sizes))]
    return max(at_once, default=0) + sum(_size(v.shape, v.dtype) for v in rest)


def _is_gathered(variable: object) -> bool:
    return isinstance(variable, ShardedVariable) and not isinstance(variable, KeptWholeVariable)


def _units(extended: ShardedExtended, model: keras.Model) -> list[list[ShardedVariable]]:
    """The variables in parts of each unit, in the order of layers; each where it is first."""
    known: set[int] = set()
    units = []
    for layer, with_inner in extended.unit_layers(model):
        own = [v for v in unit_variables(layer, with_inner) if isinstance(v, ShardedVariable)]
        units.append([v for v in own if id(v) not in known])
        known |= set(map(id, own))
    return units


def _activations(extended: ShardedExtended, model: keras.Model, inputs: object) -> int | None:
    replicas = extended._num_replicas_in_sync
    specs = keras.tree.map_structure(lambda x: _of_replica(x, replicas), inputs)
    every = [behind(v) for layer in layers_of(model) for v in layer.variables]
    variables = list({id(v): v for v in every if isinstance(v, ShardedVariable)}.values())

    @contextlib.contextmanager
    def with_weights() -> Iterator[list[tf.Tensor]]:
        wholes = [tf.compat.v1.placeholder(v.dtype, v.shape) for v in variables]
        with UnitWeights(extended, variables, 0).given(wholes):
            yield wholes

    sources = [first_copy(behind(v)) for v in model.trainable_variables]
    in_step = functools.partial(extended._memory.during, model)
    return kept_bytes(model, specs, sources, with_weights, in_step, extended.worker_devices[0])


def _of_replica(leaf: tf.Tensor, replicas: int) -> tf.TensorSpec:
    """Of the rows of a replica that has most."""
    rows, *rest = leaf.shape
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return tf.TensorSpec([-(-rows // replicas), *rest], dtype)
