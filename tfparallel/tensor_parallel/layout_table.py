"""What a layout made of a model, as tables: of its weights, and of what its layers send."""

from collections.abc import Sequence
from typing import Any

import keras

from tfparallel.internals.keras_layers import inputs_structure, layers_of, own_variables
from tfparallel.tensor_parallel.layer_calls import calls_of
from tfparallel.tensor_parallel.layer_rules import rule_of
from tfparallel.tensor_parallel.layouts import Layouts, VariableLayout
from tfparallel.tensor_parallel.sent import LayerCost, Sent, costs_of

_HEADER = ("weight", "shape", "parts", "largest bytes", "computed")
_LAYERS = ("layer", "way", "products", "forward", "backward")


def summary(model: keras.Model, layouts: Layouts, inputs: Any = None) -> str:
    """A table of the weights of `model`, which has been built, and one of its layers.

    Args:
        model: a model without known inputs has no second table, unless `inputs` are given.
        layouts: what it was laid out by.
        inputs: a batch of what it is called with.
    """
    weights = _aligned(_weights(model, layouts))
    if layouts.groups.parts == 1 or (inputs is None and inputs_structure(model) is None):
        return weights
    costs = costs_of(calls_of(model, inputs))
    return f"{weights}\n\n{_aligned(_layers(costs))}\n{_total(costs)}"


def _layers(costs: list[LayerCost]) -> list[tuple[str, ...]]:
    """A line for each call of a layer that multiplies or sends something."""
    products = sum(cost.flops for cost in costs) or 1
    lines: list[tuple[str, ...]] = [_LAYERS]
    for cost in costs:
        if cost.flops or cost.sent:
            sent = (_sent(cost.sent, forward) for forward in (True, False))
            way = cost.way or "in parts"
            lines.append((cost.layer.path, way, f"{cost.flops / products:.1%}", *sent))
    return lines


def _sent(sent: Sequence[Sent], is_forward: bool) -> str:
    each = [f"{x.kind} {x.size_bytes:,}" for x in sent if x.is_forward == is_forward]
    return ", ".join(each) or "-"


def _total(costs: list[LayerCost]) -> str:
    sent = [each for cost in costs for each in cost.sent]
    sums, gathers = (sum(x.kind == kind for x in sent) for kind in ("sum", "gather"))
    products = sum(cost.flops for cost in costs)
    in_parts = sum(cost.flops for cost in costs if cost.way != "whole")
    return (
        f"{in_parts / (products or 1):.1%} of the products are in parts. A step sends {sums} sums "
        f"and {gathers} gathers: {sum(x.size_bytes for x in sent):,} bytes for each row of the "
        "batch."
    )


def _weights(model: keras.Model, layouts: Layouts) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [_HEADER]
    for layer in layers_of(model):
        for variable in own_variables(layer):
            placement = layouts.placements.get(variable.path)
            if placement is not None:
                size = keras.backend.standardize_dtype(variable.dtype)
                lines.append(_line(placement, _bytes_of(size), rule_of(layer) is not None))
    return list(dict.fromkeys(lines))


def _bytes_of(dtype: str) -> int:
    digits = "".join(c for c in dtype if c.isdigit())
    return int(digits or 8) // 8


def _line(placement: VariableLayout, item_bytes: int, has_rule: bool) -> tuple[str, ...]:
    shape = list(placement.shape)
    rows = placement.rows
    if rows is not None:
        shape[rows.dim] = max(rows.sizes)
    numbers = item_bytes
    for size in shape:
        numbers *= size
    parts = "whole" if rows is None else f"dim {rows.dim}: {' + '.join(map(str, rows.sizes))}"
    computed = placement.reason or ("in parts" if has_rule else "from the whole: no rule")
    return placement.path, str(tuple(placement.shape)), parts, f"{numbers:,}", computed


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
