"""A metric of a function of a batch (`metrics=[keras.losses.Dice()]`), counted as one device does.

Values of single rows are counted where they are. Keras counts a number of the whole batch once for
each batch: it is put together as a loss is, by its kind (`loss_kinds.py`).
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfparallel.internals import Mean, MeanMetricWrapper
from tfparallel.internals.keras_layers import function_of_metric
from tfparallel.replicas.coupled_losses import rows_of_all
from tfparallel.replicas.loss_kinds import kind_of_metric
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step


def is_of_function(metric: Any) -> bool:
    """Whether `metric` is the mean of what a function gives."""
    return type(metric).update_state is MeanMetricWrapper.update_state


def metric_of_whole_batch(metric: Any) -> Callable:
    """`metric.update_state`, such that the mean over all replicas is that of one device.

    Args:
        metric: which `is_of_function`.
    """
    update_state = metric.update_state

    def on_replica(y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        step = current_replica_step()
        kind = "rows" if step is None else kind_of_metric(metric, y_true, y_pred, sample_weight)
        if step is None or kind == "rows":
            update_state(y_true, y_pred, sample_weight)
        elif kind == "coupled":  # a mean stays the same if each replica counts all
            update_state(*rows_of_all(step, y_true, y_pred, sample_weight))
        else:
            function, options = function_of_metric(metric)
            number = function(y_true, y_pred, **options)
            count_once(metric, number, kind, step)

    return on_replica


def count_once(metric: Any, number: Any, kind: str, step: ReplicaStep) -> None:
    """Counts a batch's number with this replica's share of rows: the shares add up to 1."""
    number = tf.convert_to_tensor(number)
    weight = tf.cast(step.weight, number.dtype)
    if kind == "sum":
        number = tf.math.divide_no_nan(number, weight)
    # Without rows a mean is 0/0, and 0 * NaN would stay in the metric.
    number = tf.where(tf.greater(step.rows, 0), number, tf.zeros_like(number))
    Mean.update_state(metric, number, sample_weight=weight)
