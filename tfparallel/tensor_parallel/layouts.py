"""What a `LayoutMap` says of each variable: which dim is in parts, or why none is."""

import logging
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from tfparallel.internals.keras_layers import layers_of
from tfparallel.tensor_parallel.computing_groups import ComputingGroups
from tfparallel.tensor_parallel.layer_rules import hook_layers_of
from tfparallel.tensor_parallel.mesh_groups import MeshGroups
from tfparallel.tensor_parallel.rows import Rows, even_rows

_log = logging.getLogger("tfparallel")
_OUTPUT = "/output"  # the end of a key that lays out what a layer returns


@dataclass(frozen=True)
class VariableLayout:
    """How one variable is kept.

    Attributes:
        path: Keras's.
        shape: of the whole.
        rows: its parts, None where each replica has the whole.
        reason: why it is not in parts; "" where it is.
    """

    path: str
    shape: tuple[int, ...]
    rows: Rows | None
    reason: str = ""


@dataclass
class Layouts:
    """A `LayoutMap` as it is used: what it was asked, and which of its patterns matched.

    Attributes:
        layout_map: of Keras.
        groups: of the mesh.
        placements: of the variables made so far, by path.
        branches: the number of the device that computes a layer, of layers of branches.
        cuts_sequences: whether what is between a row and a column is in parts along positions.
        allows_unused: whether patterns may match nothing, of which the log tells once.

    Raises:
        ValueError: for a pattern that is no regular expression, or a layout that names the model's
            axis for several dims.
    """

    layout_map: Any
    groups: MeshGroups
    placements: dict[str, VariableLayout] = field(default_factory=dict)
    branches: weakref.WeakKeyDictionary = field(default_factory=weakref.WeakKeyDictionary)
    allows_unused: bool = False
    cuts_sequences: bool = False
    _matched: set[str] = field(default_factory=set)
    _of_outputs: dict[str, tuple | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern in self.layout_map or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    "Patterns of a LayoutMap are regular expressions, such as '.*dense.*kernel'. "
                    f"Received: {pattern!r}, which is none: {error}."
                ) from None
            axes, axis = tuple(self.layout_map[pattern].axes), self.groups.model_axis
            if axis is not None and axes.count(axis) > 1:
                raise ValueError(
                    f"A layout must name the model's axis {axis!r} for one dim at most. "
                    f"Received: {axes} for {pattern!r}."
                )

    def place(
        self, path: str, shape: Sequence[int], trainable: bool, blocks: int = 1
    ) -> VariableLayout:
        """Decides for a new variable of a layer, whose last dim has so many `blocks`.

        Raises:
            ValueError: if two patterns match, or the layout is of another rank.
        """
        rows, reason = self._rows(path, tuple(shape), trainable, blocks)
        placement = VariableLayout(path, tuple(shape), rows, reason)
        self.placements[path] = placement
        return placement

    def _rows(
        self, path: str, shape: tuple, trainable: bool, blocks: int
    ) -> tuple[Rows | None, str]:
        layout = self._layout_of(path) or self._layout_of_table(path)
        if layout is None:
            return None, "no pattern matches"
        if len(layout.axes) != len(shape):
            raise ValueError(
                f"The layout of '{path}' must name an axis, or None, for each dim of {shape}. "
                f"Received: {tuple(layout.axes)}."
            )
        if self.groups.model_axis not in layout.axes:
            return None, "its layout does not name the model's axis"
        if not trainable:
            return None, "it is not trainable: each replica assigns it"
        dim = layout.axes.index(self.groups.model_axis)
        blocks = blocks if dim == len(shape) - 1 else 1
        indices = shape[dim] // blocks
        if indices < self.groups.parts:
            return None, f"dim {dim} has {indices} indices for {self.groups.parts} devices"
        if self.groups.parts == 1:
            return None, "the model's axis has one device"
        return even_rows(dim, shape[dim], self.groups.parts, blocks), ""

    def _layout_of_table(self, path: str) -> keras.distribution.TensorLayout | None:
        """Of logits beside a table, which presets of KerasHub forget: that of the table, turned."""
        layer, _, name = path.rpartition("/")
        table = self._layout_of(f"{layer}/embeddings") if name == "reverse_embeddings" else None
        if table is None:
            return None
        return keras.distribution.TensorLayout(table.axes[::-1], table.device_mesh)

    def _layout_of(self, path: str) -> keras.distribution.TensorLayout | None:
        layout = self.layout_map[path]  # raises where several patterns match
        for pattern in self.layout_map:
            if self.layout_map[pattern] is layout:
                self._matched.add(pattern)
        return layout

    def of_output(self, layer: keras.Layer) -> tuple | None:
        """Which axes the layout names for what a layer returns."""
        path = f"{layer.path}{_OUTPUT}"
        if path not in self._of_outputs:
            layout = None if self.layout_map is None else self._layout_of(path)
            self._of_outputs[path] = None if layout is None else tuple(layout.axes)
        return self._of_outputs[path]

    def hook(self, model: keras.Model, extended: ComputingGroups) -> None:
        """Lets the groups of `extended` compute the layers of a built model."""
        hook_layers_of(model, extended)

    def check_patterns(self, model: keras.Model) -> None:
        """Refuses patterns that have matched nothing, once `model` has all of its variables.

        Raises:
            ValueError: naming the patterns, and the paths that there are.
        """
        paths = [layer.path for layer in layers_of(model) if layer.path]
        for path in paths:
            self._layout_of(path + _OUTPUT)
        unused = [p for p in self.layout_map if p not in self._matched]
        if unused and self.allows_unused:
            _log.warning("Patterns of the LayoutMap match nothing: %s", unused)
            self._matched.update(unused)
        elif unused:
            raise ValueError(
                f"Every pattern of the LayoutMap must match a variable. Received: {unused}, which "
                f"match none of {sorted(self.placements)}. Patterns are regular expressions of "
                f"the whole path, such as '.*dense.*kernel', or of a layer's path and "
                f"'{_OUTPUT}': {paths}."
            )
