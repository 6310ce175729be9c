"""Variables that workers read at any time and parameter servers change, one update after another.

context                         reads                            assignments
------------------------------  -------------------------------  -------------------------------
a step on behalf of a worker    the server's value; what the     written down (`effects.py`)
                                step assigned itself
the parameter servers' part     the server's value               done
the chief, between steps        after every step under way       after every step under way
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfparallel.parameter_server.effects import current_effects
from tfparallel.parameter_server.server_variables import RowsOnServers, WholeInCheckpoints
from tfparallel.replicas.variables import CentralVariable, MetricVariable


class HandedIn:
    """Reads and assignments of the table above, over those of a class with one copy."""

    values: Any
    trainable: bool
    distribute_strategy: Any

    def _settle(self) -> None:
        """On the chief, waits for the steps under way."""
        if tf.executing_eagerly():
            self.distribute_strategy.extended.settle()

    def _seen(self) -> tf.Tensor | None:
        """What a worker's step sees; None elsewhere, and of weights that it has not assigned."""
        effects = current_effects()
        if effects is None:
            self._settle()
            return None
        effects.warn_of_update(self)
        if self.trainable:
            return effects.assigned(self, self._server_value)
        return effects.read(self, self._server_value)

    def _server_value(self) -> tf.Tensor:
        return self.values[0].read_value()

    def value(self) -> tf.Tensor:
        seen = self._seen()
        return super().value() if seen is None else seen  # type: ignore[misc]

    def read_value(self) -> tf.Tensor:
        seen = self._seen()
        return super().read_value() if seen is None else seen  # type: ignore[misc]

    def _dense_var_to_tensor(self, *args: object, **kwargs: object) -> tf.Tensor:
        seen = self._seen()
        return super()._dense_var_to_tensor(*args, **kwargs) if seen is None else seen  # type: ignore[misc]

    def sparse_read(self, indices: object, name: str | None = None) -> tf.Tensor:
        seen = self._seen()
        if seen is None:
            return super().sparse_read(indices, name=name)  # type: ignore[misc]
        return tf.gather(seen, indices, name=name)

    def _get(self) -> object:  # by `variable[0]` and other operators
        seen = self._seen()
        return super()._get() if seen is None else seen  # type: ignore[misc]

    def _get_cross_replica(self) -> tf.Tensor:
        self._settle()
        return super()._get_cross_replica()  # type: ignore[misc]

    def assign(self, value: tf.Tensor, *args: object, **kwargs: object) -> object:
        return self._hand_in("assign", value, *args, **kwargs)

    def assign_add(self, value: tf.Tensor, *args: object, **kwargs: object) -> object:
        return self._hand_in("assign_add", value, *args, **kwargs)

    def assign_sub(self, value: tf.Tensor, *args: object, **kwargs: object) -> object:
        if current_effects() is not None:
            return self._hand_in("assign_add", -value)
        return self._hand_in("assign_sub", value, *args, **kwargs)

    def _hand_in(self, name: str, value: object, *args: object, **kwargs: object) -> object:
        effects = current_effects()
        if effects is not None:
            record: Callable = getattr(effects, name)
            return record(self, value, self._server_value)
        self._settle()
        return getattr(super(), name)(value, *args, **kwargs)


class AsyncVariable(WholeInCheckpoints, HandedIn, RowsOnServers, CentralVariable):
    """Weights, slots, counters, seeds, statistics."""


class AsyncMetricVariable(WholeInCheckpoints, HandedIn, MetricVariable):
    """What a metric adds up; one copy, to which every worker adds."""
