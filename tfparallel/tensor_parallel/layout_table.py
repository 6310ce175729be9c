"""What a layout made of a model, as a table: parts and bytes of each weight, or why it is whole."""

from collections.abc import Sequence

import keras

from tfparallel.internals.keras_layers import layers_of, own_variables
from tfparallel.tensor_parallel.layer_rules import rule_of
from tfparallel.tensor_parallel.layouts import Layouts, VariableLayout

_HEADER = ("weight", "shape", "parts", "largest bytes", "computed")


def summary(model: keras.Model, layouts: Layouts) -> str:
    """A line for each weight of `model`, which has been built."""
    lines: list[tuple[str, ...]] = [_HEADER]
    for layer in layers_of(model):
        for variable in own_variables(layer):
            placement = layouts.placements.get(variable.path)
            if placement is not None:
                size = keras.backend.standardize_dtype(variable.dtype)
                lines.append(_line(placement, _bytes_of(size), rule_of(layer) is not None))
    return _aligned(list(dict.fromkeys(lines)))


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
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
