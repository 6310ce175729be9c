"""Variables of pipelines: a copy for each, on the device of its stage once that is known.

One pipeline is the common case. Where a process has several, which divide the rows of a batch, the
first of them assigns, and tells the others' copies.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import SaveSpec, device_util, distribute_lib, values_util
from tfparallel.internals.distribute import become_copy_of, number_of_first_copy, strategy_behind
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.assigned_once import CentralLayerVariable
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.seed_hooks import seed_of_stream
from tfparallel.replicas.variables import (
    CentralVariable,
    SummedWhenRead,
    is_left_to_first_replica,
)

_VALUE_KEY = "VARIABLE_VALUE"  # of a variable in TensorFlow's checkpoints


class StageVariable(CentralVariable):
    """A variable that lives once in a pipeline, whose first microbatch assigns it for all."""

    _not_followed = "the stages of a pipeline"
    _followers: tuple = ()
    _firsts: tuple[int, ...] | None = None  # pipelines whose copies all take, if some share one
    _is_copied_once_a_device = True
    _values: Any

    def is_own_context(self) -> bool:
        """Whether the caller is a replica of this strategy.

        Outside of every scope TensorFlow's default strategy has a replica of number 0.
        """
        context = distribute_lib.get_replica_context()
        return context is not None and context.strategy is strategy_behind(self)

    def pipeline(self) -> int:
        """The number of the pipeline whose copy the caller computes with."""
        if len(self._values) == 1:
            return 0
        updated = distribute_lib.get_update_replica_id()
        if updated is not None:  # in `extended.update` copies have numbers, not replicas
            return updated
        if not self.is_own_context():
            return 0
        replica = values_util.get_current_replica_id_as_int()
        return strategy_behind(self).extended.pipeline_of(replica)

    @property
    def _primary(self) -> tf.Variable:
        return self._values[self.pipeline()]

    @property
    def _unique_id(self) -> object:
        return number_of_first_copy(self)

    def _is_assigned_here(self) -> bool:
        """Whether the calling replica assigns, for all."""
        return strategy_behind(self).extended.is_first_replica()

    def _update_replica(self, update_fn: Callable, value: object, **kwargs: object) -> tf.Variable:
        if self._needs_aggregation():
            return super()._update_replica(update_fn, value, **kwargs)
        return self._assigned_by_first(update_fn, value, **kwargs)

    def _assigned_by_first(
        self, update_fn: Callable, value: object, **kwargs: object
    ) -> tf.Variable:
        if not self._is_assigned_here():
            return self._primary
        result = update_fn(self._primary, value, **kwargs)
        self.tell_copies()
        return result

    @property
    def is_shared(self) -> bool:
        """Whether pipelines have devices in common: the first one assigns, and tells the others."""
        return self._firsts is not None

    def tell_copies(self) -> None:
        """Where one pipeline assigns for all: gives other devices' copies its value."""
        if self.is_shared:
            others = {id(copy): copy for copy in self._values if copy is not self._primary}
            tell(self._primary, list(others.values()))

    def copy_in(self, pipeline: int, like: object) -> tf.Variable:
        """What pipeline number `pipeline` has in the place of `like`, another pipeline's."""
        del like
        return self._values[pipeline]

    def places(self) -> list[Sequence[str]]:
        """Where each pipeline's copy is."""
        return [(copy.device,) for copy in self.values]

    def move_to(self, places: Sequence[Sequence[str]]) -> bool:
        """Moves each pipeline's copy, with the optimizer slots that follow it, to its place.

        Args:
            places: of the copies; the devices of a place are those of its stage.

        Returns:
            Whether it was elsewhere before: functions that have read it there are out of date.
        """
        before = self.places()
        self._move_to(places)
        for variable in self._followers:  # all take the slots of the first
            variable._move_to([places[0]] * len(places) if variable.is_shared else places)
        return self.places() != before

    def share_copies(self, firsts: tuple[int, ...]) -> None:
        """Has pipelines take the copies of others; all take the optimizer slots of the first.

        Args:
            firsts: for each pipeline, that whose copy it takes.
        """
        for variable in (self, *self._followers):
            if variable._is_copied_once_a_device:
                variable._firsts = firsts if variable is self else (0,) * len(firsts)
                variable._values = tuple(variable._values[i] for i in variable._firsts)

    def _move_to(self, places: Sequence[Sequence[str]]) -> None:
        for i, devices in enumerate(places):
            first = i if self._firsts is None else self._firsts[i]
            old = self._values[i]
            new = moved(self._values[first], devices[0])
            if new is not old:
                become_copy_of(self, i, new, old)
                if first == i:
                    leave(old)


class InPartsOnStage(StageVariable):
    """A variable whose copies are in parts each, on the devices of their stage.

    A gradient tape sees one variable. What a stage takes of it are the variables of its parts.
    """

    num_parts: int

    def place_of(self, part: object) -> tuple[int, int]:
        """The number of the copy, and that in the copy, of the variable of a part."""
        raise NotImplementedError

    def on_tape(self, copy: int) -> tf.Tensor:
        """The handle that stands for a copy in `tape.gradient`."""
        raise NotImplementedError

    def gradient_of_whole(self, gradients: Sequence) -> object:
        """The gradient of the whole, of those of its parts: dense, sparse, or None for none."""
        raise NotImplementedError


def tell(source: tf.Variable, others: Sequence[tf.Variable]) -> None:
    """Gives other variables the value of one, from its device to theirs."""
    if not others:
        return
    with tf.device(source.device):
        value = tf.raw_ops.ReadVariableOp(resource=source.handle, dtype=source.dtype)
    for other in others:
        with tf.device(other.device):
            other.assign(value)


def is_on(variable: tf.Variable, device: str) -> bool:
    """Whether a variable of TensorFlow is on `device`."""
    own = variable.device
    return own == device or device_util.canonicalize(own) == device_util.canonicalize(device)


def moved(old: tf.Variable, device: str) -> tf.Variable:
    """`old`, a variable of TensorFlow, if it is on `device`; else one there of its value."""
    if is_on(old, device):
        return old
    with tf.init_scope(), tf.device(device):
        return type(old)(
            old.read_value(),
            trainable=old.trainable,
            name=old.name.partition(":")[0],
            dtype=old.dtype,
            synchronization=old.synchronization,
            aggregation=old.aggregation,
        )


def leave(old: tf.Variable) -> None:
    """Takes the value of a variable that another has replaced.

    Functions that were traced before would go on with it; they fail, and its memory is free.
    """
    with tf.init_scope(), tf.device(old.device):
        nothing = tf.zeros([0], old.dtype)
        tf.raw_ops.AssignVariableOp(resource=old.handle, value=nothing, validate_shape=False)


class LayerVariable(CentralLayerVariable, StageVariable):
    """A weight or other variable of a layer, assigned once for all microbatches of a Keras step.

    See `StateChanges`. Elsewhere replica 0 assigns it for all.
    """

    def _update_replica(self, update_fn: Callable, value: object, **kwargs: object) -> tf.Variable:
        changes = self._changes()
        if changes is None:
            return super()._update_replica(update_fn, value, **kwargs)
        changes.check_is_outside_of_layers(self)
        return self._assigned_by_first(update_fn, value, **kwargs)


class SequentialVariable(SummedWhenRead, StageVariable):
    """A variable that every microbatch assigns in turn: metrics, BatchNorm's averages, seeds.

    A metric's value is the sum of all pipelines' copies, BatchNorm's averages become their mean at
    the end of a step, and seeds are equal.
    """

    _is_copied_once_a_device = False  # each pipeline assigns its own
    deferred_to: Callable | None = None  # takes BatchNorm's averages; see `DeferredBatchNorm`

    @property
    def is_metric(self) -> bool:
        """Whether its copies are added up."""
        return self.synchronization == tf.VariableSynchronization.ON_READ

    def _is_one(self) -> bool:
        extended = strategy_behind(self).extended
        return not self.is_metric or len(self._values) * extended._num_workers == 1

    def _update_replica(self, update_fn: Callable, value: object, **kwargs: object) -> tf.Variable:
        changes = self.distribute_strategy.extended._changes
        if changes is not None and changes.is_recomputing:
            return self._primary
        if self.is_metric and is_left_to_first_replica(self.distribute_strategy.extended):
            return self._primary
        if self.deferred_to is not None and self.deferred_to(self, value):
            return self._primary
        is_state = self.dtype.is_floating and not self.is_metric
        if is_state and current_replica_step() is not None:
            strategy_behind(self).extended.note_average(self)
        is_mean = is_state and self.aggregation != tf.VariableAggregation.SUM
        has_rows = True if changes is None or not is_mean else changes.has_rows()
        if has_rows is not True:  # a mean of no rows is NaN
            old = self._primary.read_value()
            value = tf.where(has_rows, tf.convert_to_tensor(value, self.dtype), old)
        return update_fn(self._primary, value, **kwargs)

    def _get(self) -> object:
        is_update = distribute_lib.get_update_replica_id() is not None
        if is_update or self.is_own_context() or self._is_one():
            return super()._get()
        return self._get_cross_replica()

    def value(self) -> tf.Tensor:
        """The value."""
        return super().value() if self._is_one() else tf.identity(self._get())

    def _get_cross_replica(self) -> tf.Tensor:
        if self._is_one():
            return super()._get_cross_replica()
        known = self._prefetched()
        return self._total() if known is None else known

    def _total(self) -> tf.Tensor:
        values_util.mark_as_unsaveable()  # as for a `MetricVariable`
        own = sum_in_order([tf.identity(copy.read_value()) for copy in self.values])
        return strategy_behind(self).extended._sum_across_workers(own)

    def of_copy(self, value: object, index: int) -> object:
        """What pipeline number `index` of this process gets of a value of the whole."""
        if not self.is_metric:
            return value
        is_first = index == 0 and strategy_behind(self).extended._id_in_cluster == 0
        return value if is_first else tf.zeros_like(value)

    def assign(self, value: object, *args: object, **kwargs: object) -> object:
        """`tf.Variable.assign`. A metric that is reset or loaded is in the first copy of all."""
        extended = strategy_behind(self).extended
        is_one = len(self.values) * extended._num_workers == 1
        if is_one or self.is_own_context():
            return super().assign(value, *args, **kwargs)
        value = tf.convert_to_tensor(value, self.dtype)
        for i, copy in enumerate(self.values):
            with tf.device(copy.device):
                copy.assign(self.of_copy(value, i))
        return self

    def _serialize_to_tensors(self) -> dict[str, SaveSpec]:
        host = self.distribute_strategy.extended._host_device

        def read() -> tf.Tensor:
            with tf.device(host):
                return tf.identity(self._get_cross_replica())

        return {_VALUE_KEY: SaveSpec(read, "", _VALUE_KEY, self.dtype, device=host)}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> object:
        return self.assign(tf.ensure_shape(restored_tensors[_VALUE_KEY], self.shape))


class SeedVariable(SequentialVariable):
    """The state of a seed generator, from which each pipeline draws a stream of its own.

    Stages are traced once for all pipelines, so that their copies have to differ. The first one's
    is what one device draws, and what files have. In a user's loop each microbatch draws from a
    copy of its own, as replicas do: behind those of the pipelines, which are their first
    microbatch's, stand those of the others.
    """

    @property
    def _primary(self) -> tf.Variable:
        extended = strategy_behind(self).extended
        is_in_users_loop = extended._changes is None and self.is_own_context()
        if not is_in_users_loop or distribute_lib.get_update_replica_id() is not None:
            return super()._primary
        return self._values[extended.seed_copy_of(values_util.get_current_replica_id_as_int())]

    def _move_to(self, places: Sequence[Sequence[str]]) -> None:
        extended = strategy_behind(self).extended
        others = [extended.pipeline_of_seed_copy(i) for i in range(len(places), len(self._values))]
        super()._move_to([*places, *(places[pipeline] for pipeline in others)])

    def of_copy(self, value: object, index: int) -> object:
        """The state of the stream of the copy's pipeline."""
        extended = strategy_behind(self).extended
        return seed_of_stream(value, extended.pipeline_of_seed_copy(index))


class OptimizerNumber(StageVariable):
    """What updates on every stage read, such as the learning rate: once in a traced step.

    Each reading would be a tensor of its own to send, one for each weight of the other stages.
    """

    def _dense_var_to_tensor(
        self, dtype: tf.DType | None = None, name: object = None, as_ref: object = False
    ) -> tf.Tensor:
        known = self._read_once()
        if known is None or dtype not in (None, self.dtype):
            return super()._dense_var_to_tensor(dtype, name, as_ref)
        return known

    def value(self) -> tf.Tensor:
        """The value."""
        known = self._read_once()
        return super().value() if known is None else known

    def read_value(self) -> tf.Tensor:
        """The value."""
        return self.value()

    def _read_once(self) -> tf.Tensor | None:
        reads = self.distribute_strategy.extended._reads
        if reads is None:  # no step is being traced
            return None
        graph = tf.compat.v1.get_default_graph()  # branches have graphs of their own
        key = (id(self), graph, self.pipeline())
        if key not in reads:
            reads[key] = self._primary.read_value()
        return reads[key]

    def _update(self, update_fn: Callable, value: object, **kwargs: object) -> object:
        reads = self.distribute_strategy.extended._reads or {}
        for key in [key for key in reads if key[0] == id(self)]:
            del reads[key]
        return super()._update(update_fn, value, **kwargs)
