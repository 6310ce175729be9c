"""A variable of which each replica updates a part.

context                                    reads                 assignments
-----------------------------------------  --------------------  ----------------------------------
an optimizer's update (`shard_view`)       own part, `[length]`  own part, of `[length]` or a whole
elsewhere on a replica: layers, losses     the whole             all replicas together, each its
                                                                 part of what it was given
outside of replicas: files, `numpy()`      the whole             all parts

Its shape is that of the whole. Reading the whole of a `ShardedVariable` gathers it, on all workers
alike. A `KeptWholeVariable` is there on each replica, which makes reading free and storing dear.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfparallel.internals import (
    ReduceOp,
    SaveSpec,
    device_util,
    distribute_lib,
    record,
    values_util,
    variable_accessed,
)
from tfparallel.internals.keras_trainer import is_exporting
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.one_piece import InOnePiece
from tfparallel.replicas.variables import ReplicatedVariable
from tfparallel.sharded.flat_shards import FlatShards
from tfparallel.sharded.outside_of_loops import loops_around, outside_of
from tfparallel.sharded.part_of_copy import PartOfCopy, part_of_flat
from tfparallel.sharded.shard_view import current_numbers
from tfparallel.sharded.unit_gathers import UnitGathers
from tfparallel.sharded.units import forget_whole, given_whole

_VALUE_KEY = "VARIABLE_VALUE"  # of a variable in TensorFlow's checkpoints
_REDUCTIONS = {
    tf.VariableAggregation.SUM: ReduceOp.SUM,
    tf.VariableAggregation.MEAN: ReduceOp.MEAN,
}


class ShardedVariable(InOnePiece, ReplicatedVariable):
    """One part a replica.

    Args:
        strategy, values, aggregation, var_policy: what a distributed variable takes, with the parts
            of this process's replicas in the place of the copies.
        shards: how the whole is cut.

    Attributes:
        parts: what replicas of this process store.
        is_on_host: whether they are in the host's memory, not on the replicas' devices.
    """

    is_on_host = False
    _not_followed = "weights in shards"

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        values: Sequence,
        aggregation: object,
        var_policy: object = None,
        *,
        shards: FlatShards,
    ):
        super().__init__(strategy, values, aggregation, var_policy)
        self.shards, self.parts = shards, tuple(values)
        self._read_before: weakref.WeakSet = weakref.WeakSet()  # loops that take the whole

    @staticmethod
    def stored(shards: FlatShards, whole: tf.Tensor, index: int) -> tf.Tensor:
        """What the replica of shard `index` stores of a value."""
        return shards.part(whole, index)

    @property
    def shape(self) -> tf.TensorShape:
        """Of the whole."""
        return tf.TensorShape(self.shards.shape)

    def get_shape(self) -> tf.TensorShape:
        """Of the whole."""
        return self.shape

    # ---- parts -----------------------------------------------------------------------------------

    def component(self, i: int) -> tf.Variable:
        """The part that replica `i` of this process updates, as a variable `[length]`."""
        return self._values[i]

    def component_of_caller(self) -> tf.Variable:
        """`component` of the calling replica."""
        return self.component(values_util.get_current_replica_id_as_int())

    def _local_replica(self) -> int | None:
        # Outside of every scope TensorFlow is in replica 0 of a strategy of its own.
        context = distribute_lib.get_replica_context()
        if context is not None and context.strategy is not self._distribute_strategy:
            return None
        return values_util.get_current_replica_id_as_int()

    def _viewed(self) -> tf.Variable | None:
        """The calling replica's part inside an update; None everywhere else."""
        i = self._local_replica()
        return None if i is None or current_numbers() is None else self.component(i)

    # ---- reading ---------------------------------------------------------------------------------

    def whole(self) -> tf.Tensor:
        """The whole value. Gradients are recorded for `handle`, as if it were one variable's."""
        given = given_whole(self)
        if given is not None:
            return given
        i = self._local_replica()
        inner, graph = loops_around()
        if i is None:
            self._read_before.update(inner)
        with outside_of(inner, graph):
            with record.stop_recording():
                value = self._joined(i or 0)
            self.note_read(value, i or 0)
        return value

    def note_read(self, whole: tf.Tensor, i: int) -> None:
        """Tells gradient tapes that replica `i` reads the variable as `whole`."""
        own, extended = self._values[i], self._distribute_strategy.extended
        if not self.trainable or extended._asks_no_gradient(self):
            return
        variable_accessed(own)
        record.record_operation(
            "Gather", [whole], [own.handle], lambda g: [extended._gradient_of_read(self, i, g)]
        )

    def read_parts(self, i: int) -> list[tf.Tensor]:
        """What the replicas of this process store that share a copy with `i`, on their devices."""
        parts = []
        for j in self._distribute_strategy.extended._sharing_with(i):
            own = self._values[j]
            with tf.device(own.device):
                parts.append(tf.raw_ops.ReadVariableOp(resource=own.handle, dtype=own.dtype))
        return parts

    def _joined(self, i: int) -> tf.Tensor:
        """The whole, on the device of replica `i`."""
        extended = self._distribute_strategy.extended
        return extended._wholes([self], [self.read_parts(i)], i)[0]

    def value(self) -> tf.Tensor:
        if is_exporting():
            return self._exported().read_value()
        part = self._viewed()
        return self.whole() if part is None else part.read_value()

    read_value = value
    _get = value  # what operators such as `*` compute with
    _get_cross_replica = value

    def _get_on_device_or_primary(self) -> tf.Variable:
        return self._primary

    def _dense_var_to_tensor(
        self, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        del as_ref
        return tf.convert_to_tensor(self.value(), dtype, name=name)

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Rows of the whole, `[*indices, ...]`."""
        return tf.gather(self.value(), indices, name=name)

    def numpy(self) -> np.ndarray:
        """The whole; all workers have to ask together."""
        return self.value().numpy()

    def _whole_of_files(self) -> tf.Tensor:
        return self._joined(0)

    # ---- assigning -------------------------------------------------------------------------------

    def assign(self, value: object, *args: object, **kwargs: object) -> object:
        """Assigns a whole value, or in an update the part."""
        del args, kwargs
        return self._store(self._reduced(self._like(value)))

    def assign_add(self, delta: object, *args: object, **kwargs: object) -> object:
        del args, kwargs
        return self._store(self.value() + self._reduced(self._like(delta)))

    def assign_sub(self, delta: object, *args: object, **kwargs: object) -> object:
        del args, kwargs
        return self._store(self.value() - self._reduced(self._like(delta)))

    def _reduced(self, value: tf.Tensor) -> tf.Tensor:
        """What replicas assign, together, if the variable aggregates; else as it is."""
        is_on_replica = self._local_replica() is not None and self._viewed() is None
        if not is_on_replica or not self._needs_aggregation():
            return value
        if self.aggregation not in _REDUCTIONS:
            raise NotImplementedError(
                "A sharded variable that replicas assign may be summed or averaged. Received: "
                f"aggregation={self.aggregation} of '{self.name}'."
            )
        return distribute_lib.get_replica_context().all_reduce(_REDUCTIONS[self.aggregation], value)

    def _store(self, value: tf.Tensor) -> object:
        if tf.compat.v1.get_default_graph() in self._read_before:
            raise NotImplementedError(
                "A sharded variable is gathered before the loop or branch that needs its gradient, "
                f"and cannot be assigned in it. Received: an assignment of '{self.name}' in one. "
                "Call strategy.run in the loop instead."
            )
        forget_whole(self)
        part, i = self._viewed(), self._local_replica()
        if part is not None and i is not None:
            part.assign(self._own_part(value, i))
        elif i is None:
            self._store_parts([value] * len(self._values))
        else:  # together: the next read of any replica gathers the parts of all
            context = distribute_lib.get_replica_context()

            def merge(strategy: tf.distribute.Strategy, value: object) -> None:
                wholes = strategy.experimental_local_results(value)
                if isinstance(context, BuildContext):  # whose one replica stands for all
                    wholes *= len(self._values)
                self._store_parts(wholes)

            context.merge_call(merge, args=(value,))
        return self

    def _own_part(self, value: tf.Tensor, i: int) -> tf.Tensor:
        """`value` if it is a part, or what is replica `i`'s of a whole."""
        if value.shape == self.shape:
            return self.shards.part(value, self._distribute_strategy.extended._shard_of(i))
        return value

    def _store_parts(self, wholes: Sequence[tf.Tensor]) -> None:
        """Each replica of this process stores its part of its own whole."""
        extended = self._distribute_strategy.extended
        for i, (whole, own) in enumerate(zip(wholes, self._values, strict=True)):
            whole.shape.assert_is_compatible_with(self.shape)
            with tf.device(own.device):
                own.assign(self.stored(self.shards, whole, extended._shard_of(i)))

    def _like(self, value: object) -> tf.Tensor:
        return tf.convert_to_tensor(value, self.dtype)

    def scatter_add(self, rows: tf.IndexedSlices, *args: object, **kwargs: object) -> object:
        return self._scatter("scatter_add", tf.tensor_scatter_nd_add, rows)

    def scatter_sub(self, rows: tf.IndexedSlices, *args: object, **kwargs: object) -> object:
        return self._scatter("scatter_sub", tf.tensor_scatter_nd_sub, rows)

    def scatter_update(self, rows: tf.IndexedSlices, *args: object, **kwargs: object) -> object:
        return self._scatter("scatter_update", tf.tensor_scatter_nd_update, rows)

    def _scatter(self, name: str, scatter: Callable, rows: tf.IndexedSlices) -> object:
        part = self._viewed()
        if part is not None:
            return getattr(part, name)(rows)
        indices = tf.convert_to_tensor(rows.indices)[..., tf.newaxis]
        return self.assign(scatter(self.value(), indices, self._like(rows.values)))

    # ---- what this process has -------------------------------------------------------------------

    @property
    def worker_bounds(self) -> tuple[int, ...] | None:
        """Where that of each worker of a copy begins in the flat whole, and the end.

        None if each worker has all.
        """
        extended = self._distribute_strategy.extended
        if extended._num_sharing == 1:
            return None
        length = extended._devices_of_copy * self.shards.length
        workers = range(extended._num_sharing + 1)
        return tuple(min(worker * length, self.shards.size) for worker in workers)

    def numbers_here(self) -> tf.Tensor:
        """What of the flat whole is this worker's, `[length]` without padding; nothing is sent."""
        begin, end = self.range_here
        return tf.concat(self.read_parts(0), 0)[: end - begin]

    @property
    def range_here(self) -> tuple[int, int]:
        """What of `worker_bounds` is this worker's."""
        bounds, extended = self.worker_bounds, self._distribute_strategy.extended
        assert bounds is not None
        place = extended._id_in_cluster % extended._num_sharing
        return bounds[place], bounds[place + 1]

    @property
    def is_saved_here(self) -> bool:
        """Whether `numbers_here` are of the first copy: those of others are the same."""
        return self._distribute_strategy.extended._is_in_first_copy

    def assign_here(self, numbers: tf.Tensor) -> None:
        """Assigns what `numbers_here` returns."""
        numbers = self._like(numbers)
        missing = len(self._values) * self.shards.length - numbers.shape[0]
        pieces = tf.split(tf.pad(numbers, [[0, missing]]), len(self._values))
        for own, piece in zip(self._values, pieces, strict=True):
            with tf.device(own.device):
                own.assign(tf.raw_ops.DeepCopy(x=piece))  # a piece is a view, which keeps all alive

    # ---- files -----------------------------------------------------------------------------------

    def _serialize_to_tensors(self) -> dict[str, SaveSpec]:
        # A full name: else the host of the parts counts as another task than that of this tensor.
        host = device_util.canonicalize("/device:CPU:0", self._values[0].device)

        def read() -> tf.Tensor:
            with tf.device(host):
                return tf.identity(self._joined(0))

        return {_VALUE_KEY: SaveSpec(read, "", _VALUE_KEY, self.dtype, device=host)}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> object:
        return self.assign(tf.ensure_shape(restored_tensors[_VALUE_KEY], self.shape))


class UpdatedInCopiesVariable(ShardedVariable):
    """What an optimizer updates elsewhere than where it is stored: a part of a copy, for a while.

    Args:
        as `ShardedVariable`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        values: Sequence,
        aggregation: object,
        var_policy: object = None,
        *,
        shards: FlatShards,
    ):
        super().__init__(strategy, values, aggregation, var_policy, shards=shards)
        extended = strategy.extended
        self._parts_of_copies = [
            part_of_flat(copy, self, begin, shards.length, extended._updated_on(copy))
            for copy, begin in zip(values, self._begins(extended, len(values)), strict=True)
        ]

    def _begins(self, extended: UnitGathers, num_copies: int) -> list[int]:
        """Where each replica's part begins in what it stores."""
        del extended
        return [0] * num_copies

    def component(self, i: int) -> PartOfCopy:
        """There between `PartOfCopy.take` and `leave`."""
        return self._parts_of_copies[i]


class KeptWholeVariable(UpdatedInCopiesVariable):
    """A whole flat copy on each replica, of which it updates its part (ZeRO 1 and 2)."""

    worker_bounds = None

    @staticmethod
    def stored(shards: FlatShards, whole: tf.Tensor, index: int) -> tf.Tensor:
        """All of it, padded."""
        del index
        return shards.padded(whole)

    def _begins(self, extended: UnitGathers, num_copies: int) -> list[int]:
        return [extended._shard_of(i) * self.shards.length for i in range(num_copies)]

    def _joined(self, i: int) -> tf.Tensor:
        with tf.device(self._values[i].device):
            return self.shards.whole(self._values[i].read_value())

    def publish(self, padded: tf.Tensor) -> None:
        """Every replica of this process stores the parts of all."""
        for copy, part in zip(self._values, self._parts_of_copies, strict=True):
            with tf.device(copy.device):
                copy.assign(padded)
            part.leave()


class UpdatedOnHostVariable(UpdatedInCopiesVariable):
    """Parts on devices, each of which is on the host while its optimizer updates it there."""

    def put_back(self, i: int) -> None:
        """Replica `i` stores what it has updated."""
        own, on_host = self._values[i], self._parts_of_copies[i]
        with tf.device(own.device):
            own.assign(tf.identity(on_host.read_value()))
        on_host.leave()


def is_sharded(variable: object) -> bool:
    """Whether a variable of TensorFlow is one that replicas update in parts."""
    return isinstance(variable, ShardedVariable)
