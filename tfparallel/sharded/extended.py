"""The five decisions of a strategy whose replicas hold parts."""

import contextlib
from collections.abc import Container, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES, plan_buckets
from tfparallel.internals import (
    BaseOptimizer,
    distribute_lib,
    distribute_utils,
    values_util,
)
from tfparallel.internals.keras_layers import behind
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.replicas.device_names import hosts_of
from tfparallel.replicas.optimizer_hooks import gradient_source
from tfparallel.replicas.remat_scopes import without_remat_of_keras
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.segments.memory_policy import MemoryPolicy
from tfparallel.segments.step_segments import StepSegments
from tfparallel.sharded.backward import BackwardReduction, is_part
from tfparallel.sharded.creation import CreatesParts
from tfparallel.sharded.options import Sharding
from tfparallel.sharded.part_updates import PartUpdates
from tfparallel.sharded.sharded_variables import (
    KeptWholeVariable,
    ShardedVariable,
    is_sharded,
)
from tfparallel.sharded.units import layers_of_units, units_of


class ShardedExtended(CreatesParts, PartUpdates):
    """Data parallel replicas that hold a part each of weights, or of their optimizer's slots.

    Mixed into the extended of a process, or of several. Those of several processes give the two
    methods of `SharesCopies`, "the transport".
    """

    _sharding: Sharding
    _memory = MemoryPolicy()
    _backward: BackwardReduction | None = None  # while a step is traced
    # The `id` of each variable that the step trains which is traced; None outside of a step.
    _trained: frozenset[int] | None = None

    # ---- what XLA compiles -----------------------------------------------------------------------

    @property
    def _xla_can_predict(self) -> bool:
        """Weights are gathered from other devices."""
        return self._num_shards == 1

    # ---- where variables live --------------------------------------------------------------------

    def _updated_on(self, own: tf.Variable) -> str:
        """The device on which an optimizer updates what a replica stores as `own`."""
        return hosts_of([own.device])[0] if self._sharding.slots_on_host else own.device

    def _wholes(
        self,
        variables: Sequence[ShardedVariable],
        parts: Sequence[Sequence[tf.Tensor]],
        i: int,
        sent_as: str | None = None,
    ) -> list[tf.Tensor]:
        """The wholes of variables on the device of replica `i`, gathered together.

        Args:
            parts: of each variable, what the replicas of this process store that share the copy.
            sent_as: the dtype in which they are gathered; None for their own.
        """
        sent = [[_cast_where_it_is(part, sent_as) for part in each] for each in parts]
        goes_out = self._num_sharing > 1 and self._sharding.weights_on_host
        with tf.device(hosts_of(self._devices)[i] if goes_out else self._devices[i]):
            joined = [tf.concat(each, 0) for each in sent]
        if self._num_sharing > 1:
            joined = self._gather_over_processes(joined, i)
        with tf.device(self._devices[i]):
            return [
                variable.shards.whole(tf.cast(flat, variable.dtype))
                for variable, flat in zip(variables, joined, strict=True)
            ]

    # ---- how a step runs on replicas -------------------------------------------------------------

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        self._trained = frozenset(id(behind(v)) for v in model.trainable_variables)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and self.reduces_early(optimizer, model.trainable_variables):
            self._backward = BackwardReduction(self)
        segments = StepSegments(self._sharding.prefetch)
        again, moved = self._memory.rematerialized(model), self._memory.offloaded(model)
        units = units_of(model, self._sharding.patterns, _is_gathered, again, moved)
        try:
            with super()._step_of(model), without_remat_of_keras(model), segments.called(units):
                yield
        finally:
            self._backward = self._trained = None

    @property
    def sharding(self) -> Sharding:
        """What the user said of it."""
        return self._sharding

    def reduces_early(self, optimizer: BaseOptimizer, variables: Sequence) -> bool:
        """Whether Keras's own step reduces gradients as soon as they are there."""
        is_asked = self._sharding.shard != "optimizer" and not self._compresses
        return is_asked and self._updates_parts(optimizer, variables)

    def unit_layers(self, model: keras.Model) -> list[tuple[keras.Layer, bool]]:
        """The layers of `model` that are units, and whether with all layers in them."""
        again = self._memory.rematerialized(model)
        return layers_of_units(model, self._sharding.patterns, again)

    def _asks_no_gradient(self, variable: ShardedVariable) -> bool:
        """Whether it is frozen in Keras's own step, which reduces no gradient of it then.

        TensorFlow's variable was created to be trained, so that a tape would ask for one.
        """
        step = current_replica_step()
        is_keras_own = step is not None and step.weights_loss and self._trained is not None
        return is_keras_own and id(variable) not in (self._trained or ())

    def _gradient_of_read(self, variable: ShardedVariable, i: int, gradient: Gradient) -> Gradient:
        """What a tape gets where replica `i` has read the whole of `variable`."""
        if self._backward is None:
            return gradient
        return self._backward.reduced(variable, i, gradient)

    # ---- how gradients meet ----------------------------------------------------------------------

    def _own_gradients(self, gradients: list) -> list:
        """As the base's; of those that are summed parts already, what they were summed of."""
        source, backward = gradient_source(), self._backward
        if source is None or backward is None:
            return gradients
        i = values_util.get_current_replica_id_as_int()
        pairs = zip(gradients, source.variables, strict=True)
        return [backward.unreduced(behind(v), i, g) for g, v in pairs]

    def _sums_to_note(self, reduced: list) -> list:
        """As the base's; of what is in parts each replica of the first copy notes its own."""
        source = gradient_source()
        if source is None or not self._updates_parts(source.optimizer, source.variables):
            return super()._sums_to_note(reduced)
        pairs = zip(reduced, source.variables, strict=True)
        parts = [_is_cut(behind(v), total) for total, v in pairs]
        wholes = [total for total, is_cut in zip(reduced, parts, strict=True) if not is_cut]
        own = [total for total, is_cut in zip(reduced, parts, strict=True) if is_cut]
        i = values_util.get_current_replica_id_as_int()
        is_first = self._is_in_first_copy and i < self._devices_of_copy
        return super()._sums_to_note(wholes) + (own if is_first else [])

    def _reduce_gradients(self, gradients: list) -> list:
        """As the base's, of gradients of which some were reduced as soon as they were there."""
        source, step = gradient_source(), current_replica_step()
        if source is None or step is None:
            return super()._reduce_gradients(gradients)
        variables = [getattr(variable, "value", variable) for variable in source.variables]
        pairs = list(zip(gradients, variables, strict=True))
        is_done = [is_sharded(v) and is_part(g, v) for g, v in pairs]
        own = step.zero_without_rows(
            [g for g, done in zip(gradients, is_done, strict=True) if not done]
        )
        rest = iter(own)
        return self._sum_gradients(
            [g if done else next(rest) for g, done in zip(gradients, is_done, strict=True)]
        )

    def _sum_gradients(self, gradients: list) -> list:
        if not gradients:
            return []
        source = gradient_source()
        variables = [] if source is None else [getattr(v, "value", v) for v in source.variables]
        if source is None or not self._updates_parts(source.optimizer, source.variables):
            return super()._sum_gradients(gradients)
        pairs = zip(variables, gradients, strict=True)
        cut = [k for k, pair in enumerate(pairs) if _is_cut(*pair)]
        if self._compresses:
            return self._cut(super()._sum_gradients(gradients), cut, variables)
        results: dict = {k: gradients[k] for k in cut if is_part(gradients[k], variables[k])}
        others = [k for k in range(len(gradients)) if k not in cut]
        cut = [k for k in cut if k not in results]
        if others:
            sums = super()._sum_gradients([gradients[k] for k in others])
            results.update(zip(others, sums, strict=True))
        if cut:
            padded = [variables[k].shards.padded(gradients[k]) for k in cut]
            results.update(zip(cut, self._reduce_scatter(padded), strict=True))
        return [results[k] for k in range(len(gradients))]

    def _cut(self, sums: list, cut: Container[int], variables: Sequence) -> list:
        """This replica's shards of whole sums, of those at the positions `cut`."""
        shard = self._shard_of(values_util.get_current_replica_id_as_int())
        return [
            variables[k].shards.part(total, shard) if k in cut else total
            for k, total in enumerate(sums)
        ]

    def _reduce_scatter(self, padded: list) -> list:
        """This replica's shards of the sums of all replicas' `[num_shards * length]`."""

        def merge(_: tf.distribute.Strategy, *per_replica: tf.distribute.DistributedValues) -> list:
            parts = [self._local_results(each) for each in per_replica]
            sums = self._scattered_among_workers(parts)
            return [distribute_utils.regroup(tuple(each), always_wrap=True) for each in sums]

        return list(distribute_lib.get_replica_context().merge_call(merge, args=padded))

    def _scattered_among_workers(self, gradients: Sequence) -> list[list[tf.Tensor]]:
        """For each gradient, of all local replicas, the shards of each local replica."""
        if self._num_sharing == 1:
            shards = [self._scattered(parts, self._num_shards) for parts in gradients]
            return [self._on_all_copies(each) for each in self._over_workers(shards)]
        results: list = [None] * len(gradients)
        with tf.device(self._host_device):
            sums = [sum_in_order(parts) for parts in gradients]
            sizes = [total.shape[0] * total.dtype.size for total in sums]
            for bucket in plan_buckets(sizes, [total.dtype for total in sums], SENT_BUCKET_BYTES):
                rows = [tf.reshape(sums[k], [self._num_sharing, -1]) for k in bucket]
                own = self._scatter_over_processes(tf.concat(rows, 1))
                pieces = tf.split(own, [row.shape[1] for row in rows])
                for k, piece in zip(bucket, pieces, strict=True):
                    results[k] = tf.split(piece, len(self._devices))
        return results

    def _over_workers(self, sums: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Sums of this process's shards, and of the same shards of all workers that have a copy."""
        flat = [shard for shards in sums for shard in shards]
        if self._own_workers > 1:
            total = iter(self._sum_list_between_hosts(flat))
        else:
            total = iter(self._sum_gradients_across_workers(flat, None))
        return [[next(total) for _ in shards] for shards in sums]

    def _scattered(self, parts: Sequence, count: int) -> list[tf.Tensor]:
        """Each device of the first copy adds up its piece of all replicas' gradients.

        Pieces are cut where a gradient is: no device is sent more than its own.
        """
        pieces = []
        for part in parts:
            with tf.device(part.device):
                pieces.append(tf.split(part, count))
        sums = []
        for j, device in enumerate(self._devices[: self._devices_of_copy]):
            with tf.device(device):
                sums.append(sum_in_order([own[j] for own in pieces]))
        return sums

    def _on_all_copies(self, shards: list[tf.Tensor]) -> list[tf.Tensor]:
        """What the devices of the first copy have, on those of all."""
        every = list(shards)
        for i in range(len(shards), len(self._devices)):
            with tf.device(self._devices[i]):
                every.append(tf.identity(shards[i % len(shards)]))
        return every


def _cast_where_it_is(part: tf.Tensor, dtype: str | None) -> tf.Tensor:
    with tf.device(part.device):
        return part if dtype is None else tf.cast(part, dtype)


def _is_cut(variable: object, gradient: tf.Tensor | tf.IndexedSlices) -> bool:
    """Whether replicas get their parts of the sum of such gradients, to update parts with."""
    return is_sharded(variable) and not isinstance(gradient, tf.IndexedSlices)


def _is_gathered(variable: object) -> bool:
    return is_sharded(variable) and not isinstance(variable, KeptWholeVariable)
