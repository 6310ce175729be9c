"""What a replica's thread knows of a Keras step on a batch with rows of padding."""

import collections
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import ReduceOp, distribute_lib, in_stateless_scope
from tfparallel.internals.keras_layers import behind
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step


class PaddedStep(ReplicaStep):
    """One replica's share of a Keras step, some rows of which may be padding.

    Attributes:
        is_real: bool `[places]`, whether a row is one of the batch; `rows` of them are.
        places: how many rows the replica computes on, with those of padding.
    """

    def __init__(self, totals: tf.Tensor, weights_loss: bool, dtype: str):
        self.is_real = tf.greater(totals, 0)
        self.places = int(totals.shape[0])
        rows = tf.reduce_sum(tf.cast(self.is_real, tf.int32))
        total = tf.reduce_max(totals)  # 0 on a replica that has padding alone
        weight = tf.math.divide_no_nan(tf.cast(rows, dtype), tf.cast(total, dtype))
        super().__init__(rows, weight, weights_loss, statistics=[])

    def weights_of_rows(self, rank: int, dtype: Any) -> tf.Tensor:
        """1 for each row of the batch, 0 for one of padding: `[places, 1, ...]` of that rank."""
        return tf.cast(tf.reshape(self.is_real, [-1, *[1] * (rank - 1)]), dtype)

    def without_padding(self, tensor: tf.Tensor) -> tf.Tensor:
        """`tensor`, `[places, ...]`, with zeros (False) in rows of padding."""
        is_real = tf.reshape(self.is_real, [-1, *[1] * (tensor.shape.rank - 1)])
        return tf.where(is_real, tensor, tf.zeros([], tensor.dtype))

    def has_places(self, tensor: Any) -> bool:
        """Whether `tensor` has as many rows as the replica computes on."""
        return bool(tensor.shape.rank) and tensor.shape[0] == self.places

    def mean_over_rows(self, mean_over_places: tf.Tensor) -> tf.Tensor:
        """A sum that was divided by all places, divided by the number of rows instead."""
        dtype = mean_over_places.dtype
        places, rows = tf.cast(self.places, dtype), tf.cast(self.rows, dtype)
        return mean_over_places * tf.math.divide_no_nan(places, rows)


def padded_step() -> PaddedStep | None:
    """The step that the calling replica thread runs, if it has rows of padding; not in a trial."""
    step = current_replica_step()
    return step if isinstance(step, PaddedStep) and not in_stateless_scope() else None


def average_statistics(model: keras.Model, weight: tf.Tensor) -> None:
    """Statistics of each replica's own rows (BatchNorm) become their mean, weighted by rows.

    Where all replicas have as many rows it is enough to average them when they are read.
    """
    variables = [behind(variable) for variable in model.non_trainable_variables]
    groups: dict[tf.DType, list] = collections.defaultdict(list)
    for variable in variables:
        if (
            variable.synchronization == tf.VariableSynchronization.ON_READ
            and variable.aggregation == tf.VariableAggregation.MEAN
        ):
            groups[variable.dtype].append(variable)
    for dtype, own in groups.items():
        joined = tf.concat([tf.reshape(each.read_value(), [-1]) for each in own], 0)
        weighted = tf.math.multiply_no_nan(joined, tf.cast(weight, dtype))
        mean = distribute_lib.get_replica_context().all_reduce(ReduceOp.SUM, weighted)
        sizes = [each.shape.num_elements() for each in own]
        for each, part in zip(own, tf.split(mean, sizes), strict=True):
            each.assign(tf.reshape(part, each.shape))
