"""Replicas that are groups of devices, and store weights and slots together.

             model 0     model 1
shard 0      device 0    device 1      replica 0
shard 1      device 2    device 3      replica 1
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.hybrid.accumulated_norms import with_known_norm
from tfparallel.hybrid.kept_wholes import KeepsWholes, KeptWhole
from tfparallel.hybrid.pieces_on_hosts import StoredInPieces
from tfparallel.hybrid.shards import HoldsShards
from tfparallel.internals import distribute_lib, distribute_utils
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.sharded.options import Sharding
from tfparallel.tensor_parallel.extended import TensorParallelExtended
from tfparallel.tensor_parallel.known_parts import cut_apart
from tfparallel.tensor_parallel.layouts import Layouts
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import SplitVariable


class SharedSplitVariable(StoredInPieces):
    """A variable of which several replicas may share a copy: optimizers assign it, layers do not.

    The first replica assigns for all, so that another one would compute with what came of that.
    """

    @property
    def _is_shared(self) -> bool:
        return self.shards > 1

    def _to_parts(self, name: str, value: tf.Tensor | tf.IndexedSlices | tf.Variable) -> object:
        is_in_replica = self._copy() is not None and distribute_lib.get_update_replica_id() is None
        updates = getattr(self.distribute_strategy.extended._thread, "is_updating", False)
        if self._is_shared and is_in_replica and not updates:
            raise ValueError(
                "Layers and a train_step may assign only variables that are not in shards. "
                f"Received: an assignment to '{self._own_name()}' in a replica. Raise `min_size` "
                "of Sharding, or take a mesh without an axis of shards."
            )
        return super()._to_parts(name, value)


class KeptSharedVariable(KeptWhole, SharedSplitVariable):
    """As `SharedSplitVariable`, of which each replica may keep what its layers read."""


class ShardedGroupsExtended(KeepsWholes, HoldsShards, TensorParallelExtended):
    """Groups of devices that share copies of the state.

    Args:
        container_strategy: the strategy.
        layouts: with the groups of devices, those that share a copy one behind the other.
        sharding: what is in pieces.
        num_shards: how many groups share a copy.
    """

    @property
    def _split_class(self) -> type[SharedSplitVariable]:  # type: ignore[override]
        return KeptSharedVariable if self._keeps else SharedSplitVariable

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        layouts: Layouts,
        sharding: Sharding,
        num_shards: int,
    ):
        self.sharding, self.num_shards = sharding, num_shards
        super().__init__(container_strategy, layouts)

    def _devices_of_parts(self, rows: Rows, shards: int) -> tuple[str, ...]:
        starts = range(0, len(self._groups), shards)
        return tuple(
            group[k]
            for start in starts
            for k in range(len(rows.sizes))
            for group in self._groups[start : start + shards]
        )

    # ---- how gradients meet ----------------------------------------------------------------------

    def _sum_parts(self, parts: list[list[tf.Tensor]], variables: list) -> list[list[tf.Tensor]]:
        """Each piece is summed where it is stored: a reduce-scatter."""
        shared = [variable.shards > 1 for variable in variables]
        every = list(zip(parts, variables, shared, strict=True))
        own = [(p, v) for p, v, is_shared in every if not is_shared]
        rest = iter(super()._sum_parts([p for p, _ in own], [v for _, v in own]) if own else [])
        scattered = [(p, v) for p, v, is_shared in every if is_shared]
        pieces = iter(self._scattered([p for p, _ in scattered], [v for _, v in scattered]))
        return [next(pieces) if is_shared else next(rest) for is_shared in shared]

    def _scattered(
        self, parts: list[list[tf.Tensor]], variables: list[SplitVariable]
    ) -> list[list[tf.Tensor]]:
        flat = [part for own in parts for part in own]
        step, over_workers = current_replica_step(), self._over_workers()
        if step is not None:
            flat = step.zero_without_rows(flat)

        def merge(_: tf.distribute.Strategy, *values: tf.distribute.DistributedValues) -> list:
            of_replicas = iter([self._local_results(value) for value in values])
            sums = [
                total
                for variable in variables
                for k in range(len(variable.rows.sizes))
                for total in _sums_of_pieces(variable, k, next(of_replicas))
            ]
            sums = sums if over_workers is None else over_workers(sums)
            places = [(v, i) for v in variables for i in range(len(v.stored.sizes))]
            return [self._copies(v, i, x) for (v, i), x in zip(places, sums, strict=True)]

        context = distribute_lib.get_replica_context()
        summed = iter(context.merge_call(merge, args=flat) if flat else [])
        return [[next(summed) for _ in variable.stored.sizes] for variable in variables]

    def _copies(self, variable: SplitVariable, piece: int, total: tf.Tensor) -> object:
        """`total` where each copy stores the piece, for the replicas that have the copy."""
        copies = []
        for copy in variable.parts:
            with tf.device(copy[piece].device):
                copies.append(tf.identity(total))
        of_replicas = [copies[i // variable.shards] for i in range(len(self._groups))]
        return distribute_utils.regroup(tuple(of_replicas), always_wrap=True)

    # ---- how a variable is updated ---------------------------------------------------------------

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        optimizer: Any = apply.__self__  # type: ignore[attr-defined]
        self._thread.is_updating = True
        try:
            with with_known_norm(optimizer, gradients, variables):
                return super()._apply_reduced(apply, gradients, variables)
        finally:
            self._thread.is_updating = False


def _sums_of_pieces(variable: SplitVariable, part: int, gradients: tuple) -> list[tf.Tensor]:
    """The sums over replicas of the pieces of part number `part`, on their devices."""
    start = part * variable.shards
    own = variable.stored.sizes[start : start + variable.shards]
    rows = Rows(variable.rows.dim, own, variable.rows.blocks)
    split = []
    for gradient in gradients:
        with tf.device(gradient.device):
            split.append(cut_apart(gradient, rows))
    sums = []
    for j, own in enumerate(zip(*split, strict=True)):
        with tf.device(variable.parts[0][start + j].device):
            sums.append(sum_in_order(own))
    return sums
