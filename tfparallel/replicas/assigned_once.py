"""Variables with one copy that layers assign: once per batch, however many replicas call them."""

from collections.abc import Callable

import tensorflow as tf

from tfparallel.replicas.state_changes import StateChanges
from tfparallel.replicas.variables import CentralVariable


class CentralLayerVariable(CentralVariable):
    """A weight or other variable of a layer: a replica sees what it has assigned in a step.

    See `StateChanges`.
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

    def _get(self) -> object:  # what operators compute with
        seen = self._seen()
        return super()._get() if seen is None else seen

    def _dense_var_to_tensor(
        self, dtype: tf.DType | None = None, name: object = None, as_ref: object = False
    ) -> tf.Tensor:
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

    def sparse_read(self, indices: object, name: str | None = None) -> tf.Tensor:
        """Rows of the value: `[*indices, ...]`."""
        seen = self._seen()
        if seen is None:
            return super().sparse_read(indices, name=name)
        return tf.gather(seen, indices, name=name)

    def assign(self, value: tf.Tensor, *args: object, **kwargs: object) -> object:
        """`tf.Variable.assign`."""
        return self if self._take(value) else super().assign(value, *args, **kwargs)

    def assign_add(self, value: tf.Tensor, *args: object, **kwargs: object) -> object:
        """`tf.Variable.assign_add`."""
        return self._assign_sum(super().assign_add, value, value, *args, **kwargs)

    def assign_sub(self, value: tf.Tensor, *args: object, **kwargs: object) -> object:
        """`tf.Variable.assign_sub`."""
        return self._assign_sum(super().assign_sub, -value, value, *args, **kwargs)

    def _assign_sum(
        self, assign: Callable, more: object, *args: object, **kwargs: object
    ) -> object:
        is_taken = self._changes() is not None and self._take(self.value() + more)
        return self if is_taken else assign(*args, **kwargs)

    def _take(self, value: object) -> bool:
        changes = self._changes()
        return changes is not None and changes.take(self, value)
