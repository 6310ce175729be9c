"""Variables on other tasks: how checkpoints see them, and how their rows are read.

The chief writes and reads whole tensors. Left alone, `tf.train.Checkpoint` lets every task that
holds a variable write a file, to its own disk, and reads them back in a graph, where Keras misses
their shapes.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfparallel.strategies.variables import CentralVariable, MetricVariable, ReplicatedVariable
from tfparallel.tf_internals import SaveSpec

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

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> Any:
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


class ServerVariable(WholeInCheckpoints, RowsOnServers, CentralVariable):
    """One copy, on a parameter server."""


class ServerStatistics(WholeInCheckpoints, ReplicatedVariable):
    """A copy for each replica, on a parameter server."""


class ServerMetric(WholeInCheckpoints, MetricVariable):
    """A copy for each replica, on a parameter server, reduced when read."""
