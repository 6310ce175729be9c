"""Weights that replicas store together, each a piece, and compute with as wholes or as parts.

    model 2 x shard 2        replica 0                        replica 1
    stored                   pieces 0 and 2                   pieces 1 and 3
    computed with            part 0 = pieces 0, 1             part 0 = pieces 0, 1
                             part 1 = pieces 2, 3             part 1 = pieces 2, 3

The first replica of those that share a copy updates all of it, each piece on its device.

Source: Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054, stage 3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras

from tfparallel.internals import layer_of_late_variable, owner_of_new_variable
from tfparallel.internals.keras_layers import behind, trained_by
from tfparallel.internals.keras_state import shape_of_new, variable_under_creation
from tfparallel.sharded.options import Sharding
from tfparallel.tensor_parallel.holds_parts import HoldsParts
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import SplitVariable


class HoldsShards(HoldsParts):
    """Mixed into an extended of which several replicas, or pipelines, share a copy.

    Attributes:
        sharding: what is in pieces; None for nothing.
        num_shards: how many share a copy, one behind the other.
    """

    sharding: Sharding | None
    num_shards: int

    def _rows(self, kwargs: Mapping[str, Any]) -> Rows | None:
        """A weight that no layout divides is one part, where it is stored in pieces."""
        rows = super()._rows(kwargs)
        shape = None if rows is not None else self._shape_of_weight(kwargs)
        if shape is None:
            return rows
        dim = _dim_of_pieces(shape, self.num_shards)
        return None if dim is None or not self._is_large(shape) else Rows(dim, (shape[dim],))

    def _shape_of_weight(self, kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Of a layer's weight that is created; None for any other variable."""
        variable = variable_under_creation()
        layer = owner_of_new_variable() or layer_of_late_variable()
        is_weight = isinstance(layer, keras.Layer) and kwargs.get("trainable", True)
        if self.num_shards == 1 or variable is None or not is_weight:
            return None
        return shape_of_new(variable)

    def _apply_reduced(self, apply: Callable, gradients: list, variables: Any) -> Any:
        optimizer: Any = apply.__self__  # type: ignore[attr-defined]
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if inner.gradient_accumulation_steps and inner.global_clipnorm:
            _check_all_in_pieces(variables or trained_by(optimizer), inner)
        return super()._apply_reduced(apply, gradients, variables)

    def _is_large(self, sizes: Sequence[int]) -> bool:
        numbers = 1
        for size in sizes:
            numbers *= size
        return self.sharding is not None and numbers >= self.sharding.min_size

    def _shards_of(self, rows: Rows, leader: Any) -> int:
        if isinstance(leader, SplitVariable):
            return leader.shards
        return self.num_shards if min(rows.sizes) // rows.blocks >= self.num_shards else 1


def _check_all_in_pieces(variables: Iterable, optimizer: Any) -> None:
    """Refuses a norm of which replicas would not see the same accumulated gradients.

    The first that shares a copy clears it when it has updated, and the others, which update their
    own copies of what is not shared, would clip by the norm of what is left.
    """
    behind_all = [behind(v) for v in variables]
    shared = [isinstance(v, SplitVariable) and v.shards > 1 for v in behind_all]
    if any(shared) and not all(shared):
        own = [v.name for v, each in zip(behind_all, shared, strict=True) if not each]
        raise NotImplementedError(
            "Beside an axis of the model or of a pipeline, accumulated gradients are clipped by a "
            "global norm only where every weight is stored in pieces. Received: "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps} and "
            f"global_clipnorm={optimizer.global_clipnorm}, with {own[:3]} not in pieces. Clip by "
            "value or each weight's norm, accumulate nothing, or take an axis 'data' instead of "
            "'shard'."
        )


def _dim_of_pieces(shape: Sequence[int], count: int) -> int | None:
    """The first dim that has an index for each piece; None for none."""
    return next((dim for dim, size in enumerate(shape) if size >= count), None)
