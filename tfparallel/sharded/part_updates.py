"""How replicas that hold parts update them: each its own, or, where one asks for it, the whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import keras
import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES, plan_buckets
from tfparallel.internals import (
    BaseOptimizer,
    ReduceOp,
    distribute_lib,
    distribute_utils,
    values_util,
)
from tfparallel.internals.keras_layers import apply_without_replicas, trained_by
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.elementwise import is_elementwise
from tfparallel.replicas.local_copies import first_copy
from tfparallel.replicas.optimizer_hooks import build_optimizer
from tfparallel.sharded.copies import SharesCopies
from tfparallel.sharded.shard_view import shard_view
from tfparallel.sharded.sharded_variables import (
    KeptWholeVariable,
    UpdatedOnHostVariable,
    is_sharded,
)
from tfparallel.sharded.update import ReducedGradients, global_numbers, hooks_of

Value = TypeVar("Value")


class PartUpdates(SharesCopies):
    """The last of the five decisions of `ShardedExtended`."""

    def _updates_parts(self, optimizer: BaseOptimizer, variables: Sequence) -> bool:
        """Whether each replica updates its parts alone; else the whole is gathered for it.

        An optimizer that looks at whole tensors (Lamb, Muon, Adafactor, or one of the user's), or a
        constraint, needs the whole.
        """
        unconstrained = all(getattr(each, "constraint", None) is None for each in variables)
        return is_elementwise(optimizer) and unconstrained

    def _optimizer_hooks(self, optimizer: BaseOptimizer) -> Mapping[str, Callable]:
        return hooks_of(optimizer)

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        optimizer = apply.__self__  # type: ignore[attr-defined]
        own = list(trained_by(optimizer) if variables is None else variables)
        present = [v for g, v in zip(gradients, own, strict=True) if g is not None]
        if not any(is_sharded(getattr(v, "value", v)) for v in present):
            return super()._apply_reduced(apply, gradients, variables)
        build_optimizer(optimizer, own)
        if not self._updates_parts(optimizer, present):
            self._apply_to_wholes(optimizer, apply, gradients, variables)
            return None
        i = values_util.get_current_replica_id_as_int()
        reduced = ReducedGradients(gradients, own, self._shard_of(i))
        kept = [value for value in reduced.values if isinstance(value, KeptWholeVariable)]
        lent = [value for value in reduced.values if isinstance(value, UpdatedOnHostVariable)]
        for variable in (*kept, *lent):
            variable.component(i).take()
        with shard_view(global_numbers(optimizer, reduced, self._sum_over_shards)):
            super()._apply_reduced(apply, reduced.parts, variables)
        for variable in lent:
            variable.put_back(i)
        self._publish(kept)
        return None

    def _sum_over_shards(self, value: Value) -> Value:
        """The sum of what the replicas have that share one copy; called in a replica context."""
        if self._num_shards == self._num_replicas_in_sync:
            return self._replica_ctx_all_reduce(ReduceOp.SUM, value)
        if self._num_sharing > 1:  # all copies have the same
            own = value if self._is_in_first_copy else tf.nest.map_structure(tf.zeros_like, value)
            return self._replica_ctx_all_reduce(ReduceOp.SUM, own)

        def merge(_: tf.distribute.Strategy, *tensors: tf.distribute.DistributedValues) -> list:
            parts = [self._local_results(tensor) for tensor in tensors]
            return [sum_in_order(each[: self._devices_of_copy]) for each in parts]

        flat = tf.nest.flatten(value)
        total = distribute_lib.get_replica_context().merge_call(merge, args=flat)
        return tf.nest.pack_sequence_as(value, total)

    def _apply_to_wholes(
        self,
        optimizer: BaseOptimizer,
        apply: Callable,
        gradients: list,
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        """One update for all replicas of this process: gathers, computes, keeps the parts."""

        def merge(_: tf.distribute.Strategy, gradients: list) -> None:
            whole = [None if g is None else self._local_results(g)[0] for g in gradients]
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                apply_without_replicas(optimizer, whole, variables)
            else:
                apply(whole, variables)

        distribute_lib.get_replica_context().merge_call(merge, args=(gradients,))

    def _publish(self, kept: Sequence[KeptWholeVariable]) -> None:
        """Ends an update: nobody reads a variable before all replicas have updated their parts."""

        def merge(_: tf.distribute.Strategy) -> None:
            sizes = [v.dtype.size * v.shards.length * v.shards.num_shards for v in kept]
            for bucket in plan_buckets(sizes, [None] * len(kept), SENT_BUCKET_BYTES):
                parts = [self._updated_here(kept[k]) for k in bucket]
                wholes = parts if self._num_sharing == 1 else self._gather_over_processes(parts)
                for k, whole in zip(bucket, wholes, strict=True):
                    length = kept[k].shards.num_shards * kept[k].shards.length
                    kept[k].publish(tf.ensure_shape(whole, [length]))

        distribute_lib.get_replica_context().merge_call(merge)

    def _updated_here(self, variable: KeptWholeVariable) -> tf.Tensor:
        """What the replicas of this process have updated that share a copy."""
        local = range(self._devices_of_copy)
        return tf.concat([variable.component(i).read_value() for i in local], 0)

    def _replica_ctx_update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        if not is_sharded(var):
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        part = var.component_of_caller()
        with tf.device(part.device):
            return fn(part, *args, **kwargs)

    def _update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        """Outside of replicas one device updates the whole, which each replica cuts for itself."""
        if not is_sharded(var):
            return super()._update(var, fn, args, kwargs, group)
        args, kwargs = distribute_utils.select_replica(0, (args, kwargs))
        with tf.device(first_copy(var).device):
            return fn(var, *args, **kwargs)
