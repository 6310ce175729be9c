"""Variables of a pipeline: one copy each, on the device of its stage once that is known."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfparallel.internals import device_util, values_util
from tfparallel.internals.distribute import become_copy_of, only_copy_of
from tfparallel.pipeline.state_changes import StateChanges
from tfparallel.replicas.variables import CentralVariable


class StageVariable(CentralVariable):
    """A variable that lives once, on its stage's device; replica 0 assigns it for all."""

    _followers: tuple = ()

    def move_to(self, device: str) -> None:
        """Moves the variable, and the optimizer slots that follow it, to `device`."""
        for variable in (self, *self._followers):
            old = only_copy_of(variable)
            if device_util.canonicalize(old.device) == device_util.canonicalize(device):
                continue
            with tf.init_scope(), tf.device(device):
                new = type(old)(
                    old.read_value(),
                    trainable=old.trainable,
                    name=old.name.partition(":")[0],
                    dtype=old.dtype,
                    synchronization=old.synchronization,
                    aggregation=old.aggregation,
                )
            become_copy_of(variable, new, old)


class LayerVariable(StageVariable):
    """A weight or other variable of a layer, assigned once for all microbatches of a Keras step.

    See `StateChanges`. Elsewhere replica 0 assigns it for all.
    """

    def _changes(self) -> StateChanges | None:
        of_batch = (tf.VariableAggregation.NONE, tf.VariableAggregation.MEAN)
        is_once = self.aggregation in of_batch
        return self.distribute_strategy.extended._changes if is_once else None

    def _seen(self) -> tf.Tensor | None:
        changes = self._changes()
        seen = None if changes is None else changes.seen(self)
        if seen is None or not self.trainable:
            return seen
        read = self._primary.read_value()  # whose gradient is the variable's
        return seen + (read - tf.stop_gradient(read))

    def _get(self) -> Any:  # what operators compute with
        seen = self._seen()
        return super()._get() if seen is None else seen

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: Any = False) -> Any:
        seen = self._seen()
        if seen is None or dtype not in (None, self.dtype):
            return super()._dense_var_to_tensor(dtype, name, as_ref)
        return seen

    def value(self) -> tf.Tensor:
        """The value."""
        seen = self._seen()
        return super().value() if seen is None else seen

    def read_value(self) -> tf.Tensor:
        """The value."""
        seen = self._seen()
        return super().read_value() if seen is None else seen

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Rows of the value: `[*indices, ...]`."""
        seen = self._seen()
        if seen is None:
            return super().sparse_read(indices, name=name)
        return tf.gather(seen, indices, name=name)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """`tf.Variable.assign`."""
        return self if self._take(value) else super().assign(value, *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """`tf.Variable.assign_add`."""
        return self._assign_sum(super().assign_add, value, value, *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """`tf.Variable.assign_sub`."""
        return self._assign_sum(super().assign_sub, -value, value, *args, **kwargs)

    def _assign_sum(self, assign: Callable, more: Any, *args: Any, **kwargs: Any) -> Any:
        is_taken = self._changes() is not None and self._take(self.value() + more)
        return self if is_taken else assign(*args, **kwargs)

    def _take(self, value: Any) -> bool:
        changes = self._changes()
        return changes is not None and changes.take(self, value)

    def _update_replica(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        changes = self._changes()
        if changes is None:
            return super()._update_replica(update_fn, value, **kwargs)
        changes.check_is_outside_of_layers(self)
        is_first = values_util.get_current_replica_id_as_int() == 0
        return update_fn(self._primary, value, **kwargs) if is_first else self._primary


class SequentialVariable(StageVariable):
    """A variable that every microbatch assigns in turn: metrics, BatchNorm's averages, seeds."""

    deferred_to: Callable | None = None  # takes BatchNorm's averages; see `DeferredBatchNorm`

    def _update_replica(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        if self.deferred_to is not None and self.deferred_to(self, value):
            return self._primary
        return update_fn(self._primary, value, **kwargs)


class OptimizerNumber(StageVariable):
    """What updates on every stage read, such as the learning rate: once in a traced step.

    Each reading would be a tensor of its own to send, one for each weight of the other stages.
    """

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: Any = False) -> Any:
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
        key = (id(self), tf.compat.v1.get_default_graph())  # branches have graphs of their own
        if key not in reads:
            reads[key] = self._primary.read_value()
        return reads[key]

    def _update(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        reads = self.distribute_strategy.extended._reads or {}
        for key in [key for key in reads if key[0] == id(self)]:
            del reads[key]
        return super()._update(update_fn, value, **kwargs)
