"""Variables on other tasks: how checkpoints see them, and how their rows are read.

The chief writes and reads whole tensors. Left alone, `tf.train.Checkpoint` lets every task that
holds a variable write a file, to its own disk, and reads them back in a graph, where Keras misses
their shapes.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfparallel.internals import SaveSpec
from tfparallel.replicas.assigned_once import CentralLayerVariable
from tfparallel.replicas.variables import CentralVariable, MetricVariable, ReplicatedVariable

VALUE_KEY = "VARIABLE_VALUE"  # of a variable in TensorFlow's checkpoints


class WholeInCheckpoints:
    """A variable whose value `tf.train.Checkpoint` saves and restores on the chief."""

    distribute_strategy: Any
    dtype: tf.DType
    shape: tf.TensorShape

    def _serialize_to_tensors(self) -> dict[str, SaveSpec]:
        chief = self.distribute_strategy.extended._host_device

        def read() -> tf.Tensor:
            with tf.device(chief):
                return tf.identity(self.read_value())  # type: ignore[attr-defined]

        return {VALUE_KEY: SaveSpec(read, "", VALUE_KEY, self.dtype, device=chief)}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> object:
        value = tf.ensure_shape(restored_tensors[VALUE_KEY], self.shape)
        return self.assign(value)  # type: ignore[attr-defined]


class RowsOnServers:
    """A variable with one copy, whose rows can be read where they are."""

    values: Any
    trainable: bool

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Rows, gathered on the server that has them: `[*indices, ...]`."""
        (variable,) = self.values
        with tf.device(variable.device):
            return variable.sparse_read(indices, name=name)


class TellsOfChanges:
    """A variable whose strategy wants to know when it is assigned between steps."""

    distribute_strategy: Any

    def assign(self, *args: Any, **kwargs: Any) -> object:
        return self._tell("assign", *args, **kwargs)

    def assign_add(self, *args: Any, **kwargs: Any) -> object:
        return self._tell("assign_add", *args, **kwargs)

    def assign_sub(self, *args: Any, **kwargs: Any) -> object:
        return self._tell("assign_sub", *args, **kwargs)

    def _tell(self, name: str, *args: object, **kwargs: object) -> object:
        if tf.executing_eagerly():
            self.distribute_strategy.extended._changed_elsewhere()
        return getattr(super(), name)(*args, **kwargs)


class ServerVariable(TellsOfChanges, WholeInCheckpoints, RowsOnServers, CentralVariable):
    """One copy, on a parameter server."""


class ServerLayerVariable(CentralLayerVariable, ServerVariable):
    """As `CentralLayerVariable`, on a parameter server."""


class ServerStatistics(TellsOfChanges, WholeInCheckpoints, ReplicatedVariable):
    """A copy for each replica, on a parameter server."""


class ServerMetric(TellsOfChanges, WholeInCheckpoints, MetricVariable):
    """A copy for each replica, on a parameter server, reduced when read."""
