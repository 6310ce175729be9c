"""Weights that replicas store together, each a piece, and compute with as wholes or as parts.

    model 2 x shard 2        replica 0                        replica 1
    stored                   pieces 0 and 2                   pieces 1 and 3
    computed with            part 0 = pieces 0, 1             part 0 = pieces 0, 1
                             part 1 = pieces 2, 3             part 1 = pieces 2, 3

The first replica of those that share a copy updates all of it, each piece on its device.

Source: Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054, stage 3.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.hybrid.accumulated_norms import clipping_by_known_norm
from tfparallel.hybrid.pieces_on_hosts import StoredInPieces
from tfparallel.internals import BaseOptimizer, layer_of_late_variable, owner_of_new_variable
from tfparallel.internals.keras_layers import behind, trained_by
from tfparallel.internals.keras_state import shape_of_new, variable_under_creation
from tfparallel.replicas.device_names import hosts_of
from tfparallel.replicas.elementwise import is_elementwise
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

    @property
    def _pieces_of_part(self) -> int:
        """How many store a part together."""
        return self.num_shards

    def _rows(self, kwargs: Mapping[str, object]) -> Rows | None:
        """A weight that no layout divides is one part, where it is stored in pieces."""
        rows = super()._rows(kwargs)
        shape = None if rows is not None else self._shape_of_weight(kwargs)
        if shape is None:
            return rows
        dim = _dim_of_pieces(shape, self._pieces_of_part)
        return None if dim is None or not self._is_large(shape) else Rows(dim, (shape[dim],))

    def _create_variable(self, next_creator: Callable, **kwargs: object) -> tf.Variable:
        self._thread.is_new_slot = isinstance(kwargs.get("colocate_with"), SplitVariable)
        return super()._create_variable(next_creator, **kwargs)

    def _variable_class(self, owner: object, kwargs: Mapping[str, object]) -> Any:
        kind = super()._variable_class(owner, kwargs)
        if self._new is None or self.sharding is None or not self._is_new_in_pieces(self._new[1]):
            return kind
        is_slot, sharding = self._thread.is_new_slot, self.sharding
        is_on_host = sharding.slots_on_host if is_slot else sharding.weights_on_host
        return functools.partial(kind, is_on_host=is_on_host)

    def _is_new_in_pieces(self, shards: int) -> bool:
        """Whether a new variable, in so many shards, is stored in pieces."""
        return shards > 1

    def _variable_devices(self, variable_class: type | functools.partial) -> tuple[str, ...]:
        devices = super()._variable_devices(variable_class)
        is_on_host = getattr(variable_class, "keywords", {}).get("is_on_host", False)
        return tuple(hosts_of(devices)) if is_on_host else devices

    def _shape_of_weight(self, kwargs: Mapping[str, object]) -> tuple[int, ...] | None:
        """Of a layer's weight that is created; None for any other variable."""
        variable = variable_under_creation()
        layer = owner_of_new_variable() or layer_of_late_variable()
        is_weight = isinstance(layer, keras.Layer) and kwargs.get("trainable", True)
        if self._pieces_of_part == 1 or variable is None or not is_weight:
            return None
        return shape_of_new(variable)

    def _optimizer_hooks(self, optimizer: BaseOptimizer) -> Mapping[str, Callable]:
        return clipping_by_known_norm(optimizer, super()._optimizer_hooks(optimizer))

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        optimizer: Any = apply.__self__  # type: ignore[attr-defined]
        trained = variables or trained_by(optimizer)
        with self._on_hosts(optimizer, trained):
            return super()._apply_reduced(apply, gradients, variables)

    @contextlib.contextmanager
    def _on_hosts(self, optimizer: BaseOptimizer, variables: Iterable) -> Iterator[None]:
        """Within it, what has its slots on hosts is there too, for who updates it in parts."""
        lent: list[StoredInPieces] = []
        if self.sharding is not None and self.sharding.slots_on_host and is_elementwise(optimizer):
            own = [behind(variable) for variable in variables]
            pieces = [each for each in own if isinstance(each, StoredInPieces) and each.shards > 1]
            lent = [each for each in pieces if not each.is_on_host and each.is_assigned_here()]
        for each in lent:
            each.lend()
        try:
            yield
        finally:
            for each in lent:
                each.put_back()

    def _is_large(self, sizes: Sequence[int]) -> bool:
        numbers = 1
        for size in sizes:
            numbers *= size
        return self.sharding is not None and numbers >= self.sharding.min_size

    def _shards_of(self, rows: Rows, leader: object) -> int:
        if isinstance(leader, SplitVariable):
            return leader.shards
        return self.num_shards if min(rows.sizes) // rows.blocks >= self.num_shards else 1


def _dim_of_pieces(shape: Sequence[int], count: int) -> int | None:
    """The first dim that has an index for each piece; None for none."""
    return next((dim for dim, size in enumerate(shape) if size >= count), None)
