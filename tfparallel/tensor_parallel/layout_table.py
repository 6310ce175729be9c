"""What a layout made of a model, as tables: of its weights, and of what its layers send."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import keras
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from tfparallel.internals.keras_layers import (
    compile_loss_of,
    inputs_structure,
    layers_of,
    own_variables,
)
from tfparallel.tensor_parallel.layer_calls import calls_of
from tfparallel.tensor_parallel.layer_rules import rules_of
from tfparallel.tensor_parallel.layouts import Layouts, VariableLayout
from tfparallel.tensor_parallel.logits import losses_of_logits
from tfparallel.tensor_parallel.sent import KINDS, LayerCost, Sent, costs_of

_HEADER = ("weight", "shape", "parts", "largest bytes", "computed")
_LAYERS = ("layer", "way", "products", "forward", "backward")
_WIDE = 10_000  # of a table that is made into text: no line is folded


@dataclass(frozen=True)
class LayoutSummary:
    """Where a model's weights are, and what its layers send; `print` it.

    Attributes:
        weights: for each its path, shape, parts, the bytes of the largest, and how its layer is
            computed, or why it is whole.
        layers: each call of one that multiplies or sends; empty where inputs are not known.
        over_processes: which axis of the mesh stays inside of a process; empty where there is one.
    """

    weights: tuple[tuple[str, ...], ...]
    layers: tuple[LayerCost, ...]
    over_processes: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _table(_HEADER, self.weights)
        if self.layers:
            yield ""
            yield _table(_LAYERS, _lines(self.layers))
            yield _total(self.layers)
        if self.over_processes:
            yield self.over_processes

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDE, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def summary(model: keras.Model, layouts: Layouts, inputs: object = None) -> LayoutSummary:
    """The tables of `model`, which has been built.

    Args:
        model: a model without known inputs has no second table, unless `inputs` are given.
        layouts: what it was laid out by.
        inputs: a batch of what it is called with.
    """
    weights = tuple(_weights(model, layouts))
    if layouts.groups.parts == 1 or (inputs is None and inputs_structure(model) is None):
        return LayoutSummary(weights, (), layouts.groups.over_processes())
    costs = costs_of(calls_of(model, inputs), layouts.branches, _takes_logits(model))
    return LayoutSummary(weights, tuple(costs), layouts.groups.over_processes())


def _takes_logits(model: keras.Model) -> bool | None:
    """Whether the compiled loss of a model takes logits in parts; None without a loss."""
    if compile_loss_of(model) is None:
        return None
    return bool(losses_of_logits(model))


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def _lines(costs: Sequence[LayerCost]) -> list[tuple[str, ...]]:
    """A line for each call of a layer that multiplies or sends something."""
    products = sum(cost.flops for cost in costs) or 1
    lines: list[tuple[str, ...]] = []
    for cost in costs:
        if cost.flops or cost.sent:
            sent = (_sent(cost.sent, forward) for forward in (True, False))
            way = cost.way or "in parts"
            lines.append((cost.layer.path, way, f"{cost.flops / products:.1%}", *sent))
    return lines


def _sent(sent: Sequence[Sent], is_forward: bool) -> str:
    each = [f"{x.kind} {x.size_bytes:,}" for x in sent if x.is_forward == is_forward]
    return ", ".join(each) or "-"


def _total(costs: Sequence[LayerCost]) -> str:
    sent = [each for cost in costs for each in cost.sent]
    counts = {kind: sum(x.kind == kind for x in sent) for kind in KINDS}
    named = {"sum": "sums", "gather": "gathers", "copy": "copies"}
    told = [f"{n} {named[kind]}" for kind, n in counts.items() if n or kind != "copy"]
    products = sum(cost.flops for cost in costs)
    in_parts = sum(cost.flops for cost in costs if cost.way != "whole")
    return (
        f"{in_parts / (products or 1):.1%} of the products are in parts. A step sends "
        f"{' and '.join(told)}: {sum(x.size_bytes for x in sent):,} bytes for each row of the "
        "batch."
    )


def _weights(model: keras.Model, layouts: Layouts) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for layer in layers_of(model):
        for variable in own_variables(layer):
            placement = layouts.placements.get(variable.path)
            if placement is not None:
                size = keras.backend.standardize_dtype(variable.dtype)
                lines.append(_line(placement, _bytes_of(size), bool(rules_of(layer))))
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
    if rows is None:
        parts = "whole"
    elif rows.is_cut:
        parts = f"dim {rows.dim}: {' + '.join(map(str, rows.sizes))}"
    else:
        parts = f"device {rows.first}"
    in_parts = "in parts" if has_rule else "from the whole: no rule"
    computed = placement.reason or ("there" if rows is not None and not rows.is_cut else in_parts)
    return placement.path, str(tuple(placement.shape)), parts, f"{numbers:,}", computed
