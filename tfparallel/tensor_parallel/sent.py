"""What the layers of a model send between the devices of a group, in one step, counted.

    way      forward                              backward
    column   its input, if that is in parts       the gradient of its input, summed
    row      its output, summed                   the gradient of its input, if that was whole
    heads    its output, summed                   the gradient of each input, summed
    tokens   its output, summed
    aligned  moments of what it normalises        their gradients
    units    h of all steps (an RNN's column)     h of all steps again, and its gradient, summed
    whole    its input, if that is in parts
    loss     three numbers of each position, of     the gradients of two
             logits in parts; else the outputs      the gradient of the outputs

The gradient of what the model is called with is not computed, and not counted.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfparallel.tensor_parallel.cuts import Cut, numbers_of
from tfparallel.tensor_parallel.layer_calls import LayerCall, ModelCalls
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.rules.elementwise_layers import keeps_parts
from tfparallel.tensor_parallel.rules.normalization import numbers_sent
from tfparallel.tensor_parallel.split_variable import split_of

_PASSES = ("", "aligned")
KINDS = ("sum", "gather", "copy")


@dataclass(frozen=True)
class Sent:
    """One tensor that all devices of the group give a part of, or get.

    Attributes:
        kind: "sum" of a tensor of each device, "gather" of parts, or a "copy" to another device.
        is_forward: else it is a gradient.
        size_bytes: of the tensor, for one row of the batch.
    """

    kind: str
    is_forward: bool
    size_bytes: int


@dataclass(frozen=True)
class LayerCost:
    """One call of a layer.

    Attributes:
        layer: of Keras, or `TheLoss`.
        way: as above; "" for a layer without weights in parts that passes on what it gets; the
            device of a branch.
        flops: for one row of the batch.
        sent: in one step.
    """

    layer: Any
    way: str
    flops: int
    sent: tuple[Sent, ...]


class TheLoss:
    """Stands for a layer: what a model was compiled with."""

    path = "loss"


def costs_of(
    model: ModelCalls,
    branches: Mapping[keras.Layer, int] | None = None,
    takes_logits: bool | None = None,
) -> list[LayerCost]:
    """Of each call of a model whose weights are in parts by now, and of its loss.

    Args:
        model: its calls.
        takes_logits: whether its loss takes logits in parts; None where it has none.
        branches: the number of the device of each layer of a branch, in a model of branches.
    """
    if branches:
        return _costs_of_branches(model, branches)
    known: dict[int, Rows | None] = {}
    borders = {id(x) for x in model.borders}
    costs = []
    for call in model.calls:
        way = _way(call)
        sent = tuple(_sent(call, way, known, borders))
        for tensor in call.outputs:
            known[id(tensor)] = _rows_of_output(call, way, known)
        cuts = call.cuts
        costs.append(LayerCost(call.layer, way, cuts.flops if cuts else 0, sent))
    if takes_logits is not None:
        outputs = [x for x in model.borders if known.get(id(x)) is not None]
        costs += [_cost_of_loss(x, known[id(x)], takes_logits) for x in outputs]
    return costs


def _cost_of_loss(output: tf.Tensor, rows: Rows | None, takes_logits: bool) -> LayerCost:
    is_last = rows is not None and rows.dim == len(output.shape) - 1
    if not (takes_logits and is_last):
        both = (Sent("gather", is_forward, _bytes(output)) for is_forward in (True, False))
        return LayerCost(TheLoss(), "whole", 0, tuple(both))
    positions = numbers_of(output.shape[:-1]) * output.dtype.size
    sent = Sent("sum", True, 3 * positions), Sent("sum", False, 2 * positions)
    return LayerCost(TheLoss(), "logits", 0, sent)


def _costs_of_branches(model: ModelCalls, branches: Mapping[keras.Layer, int]) -> list[LayerCost]:
    borders = {id(x) for x in model.borders}
    device_of: dict[int, int] = {}
    costs = []
    for call in model.calls:
        own = branches.get(call.layer, 0)
        sent = []
        for x in call.inputs:
            if device_of.get(id(x), 0) != own:
                sent.append(Sent("copy", True, _bytes(x)))
                if id(x) not in borders and x.dtype.is_floating:
                    sent.append(Sent("copy", False, _bytes(x)))
        device_of |= {id(x): own for x in call.outputs}
        way = f"device {own}" if call.layer in branches else "whole"
        flops = call.cuts.flops if call.cuts else 0
        costs.append(LayerCost(call.layer, way, flops, tuple(sent)))
    return costs


def _way(call: LayerCall) -> str:
    cuts = call.cuts
    for name, cut in (cuts.ways if cuts else {}).items():
        if _rows(cut) is not None:
            return name
    return "" if keeps_parts(call.layer) else "whole"


def _rows(cut: Cut) -> Rows | None:
    """How the first weight of a way is in parts, if it is in parts that way."""
    weight, dim = cut.dims[0]
    split = split_of(weight)
    is_cut = split is not None and split.rows.is_cut and split.rows.dim == dim
    return split.rows if is_cut else None  # type: ignore[union-attr]


def _rows_of_output(call: LayerCall, way: str, known: dict) -> Rows | None:
    cut = call.cuts.ways[way] if call.cuts and way in ("column", "aligned") else None
    if cut is not None and cut.tensor_dim is not None:
        return Rows(cut.tensor_dim, _rows(cut).sizes)  # type: ignore[union-attr]
    given = {known.get(id(x)) for x in call.inputs}
    return given.pop() if way in _PASSES and len(given) == 1 else None


def _sent(call: LayerCall, way: str, known: dict, borders: set) -> Iterator[Sent]:
    has_gradient = [x for x in call.inputs if id(x) not in borders and x.dtype.is_floating]
    in_parts = [x for x in call.inputs if known.get(id(x)) is not None]
    are_parts = len(in_parts) == len(call.inputs)
    takes_parts = way == "row" or (way in _PASSES and are_parts)
    if are_parts and takes_parts:
        yield from _moments(call)
    if not takes_parts:
        yield from (Sent("gather", True, _bytes(x)) for x in in_parts)
    if way in ("row", "heads", "tokens"):
        yield from (Sent("sum", True, _bytes(x)) for x in call.outputs[:1])
    if way == "heads":
        yield from _summed_projections(call)
    if way in ("column", "heads"):
        different = {id(x): x for x in has_gradient}.values()
        yield from (Sent("sum", False, _bytes(x)) for x in different)
    if way == "column" and isinstance(call.layer, keras.layers.RNN):
        yield from _states(call)
    if way == "row" or (way == "aligned" and not are_parts and call.cuts.flops):  # type: ignore[union-attr]
        whole = [x for x in has_gradient if known.get(id(x)) is None]
        yield from (Sent("gather", False, _bytes(x)) for x in whole)


def _summed_projections(call: LayerCall) -> Iterator[Sent]:
    """Queries, keys and values of kernels by rows: sums, of which each device takes its heads."""
    for kernel, dim in call.cuts.ways["heads"].dims:  # type: ignore[union-attr]
        split = split_of(kernel)
        if split is not None and split.rows.is_cut and split.rows.dim != dim:
            features = kernel.shape[split.rows.dim]
            *positions, _ = call.outputs[0].shape
            numbers = numbers_of(positions) * math.prod(kernel.shape) // features
            size_bytes = numbers * call.outputs[0].dtype.size
            yield from (Sent("sum", is_forward, size_bytes) for is_forward in (True, False))


def _moments(call: LayerCall) -> Iterator[Sent]:
    """What a layer that normalises tells of its features."""
    count = numbers_sent(call.layer)
    if count:
        *positions, _ = call.inputs[0].shape
        size_bytes = 4 * count * numbers_of(positions)
        yield from (Sent("sum", is_forward, size_bytes) for is_forward in (True, False))


def _states(call: LayerCall) -> Iterator[Sent]:
    """What an RNN's devices tell one another of h, in all steps together."""
    sequence = call.inputs[0]
    size_bytes = (sequence.shape[1] or 1) * call.layer.cell.units * sequence.dtype.size
    yield Sent("gather", True, size_bytes)
    yield Sent("gather", False, size_bytes)
    yield Sent("sum", False, size_bytes)


def _bytes(tensor: tf.Tensor) -> int:
    return numbers_of(tensor.shape) * tensor.dtype.size
