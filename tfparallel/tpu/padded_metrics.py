"""Metrics that do not count rows of padding: each is given weights, 0 for those rows."""

import inspect
from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.internals import Mean, MeanMetricWrapper, Sum, get_keras_mask
from tfparallel.internals.keras_layers import function_of_metric
from tfparallel.replicas.coupled_metrics import count_once
from tfparallel.replicas.loss_kinds import kind_of_metric
from tfparallel.tpu.padded_losses import by_row
from tfparallel.tpu.padded_step import PaddedStep, padded_step

_WAY_OUT = "Leave a smaller last batch out (tf.data's batch(drop_remainder=True))."
_FLAT = (keras.metrics.IoU, keras.metrics.MeanIoU)  # take as many weights as labels


def update_of_real_rows(metric: keras.Metric, counts_rows: bool) -> Callable:
    """`metric.update_state`, for which rows of padding are not there.

    Args:
        metric: of a model.
        counts_rows: whether Keras updates it with the number of rows that a replica computes on,
            as it does where it tells the loss.
    """
    update, update_state = type(metric).update_state, metric.update_state
    if counts_rows:
        own: Callable = _of_loss
    elif update in (Mean.update_state, Sum.update_state):
        own = _of_values
    elif update is MeanMetricWrapper.update_state:
        own = _of_function
    else:
        own = _of_rows

    def on_replica(*args: object, **kwargs: object) -> object:
        step = padded_step()
        if step is None:
            return update_state(*args, **kwargs)
        return own(metric, update_state, step, *args, **kwargs)

    return on_replica


def _of_values(
    metric: keras.Metric,
    update_state: Callable,
    step: PaddedStep,
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
) -> object:
    """`Mean` and `Sum`: of a number of the batch, such as its loss, or of values of rows."""
    values = tf.convert_to_tensor(values)
    if values.shape.rank:
        _check_rows(metric, step, values)
        weight = _weights(sample_weight, step, 1, metric.dtype)
        return update_state(step.without_padding(values), sample_weight=weight)
    weight = tf.cast(step.weight, metric.dtype)  # all replicas together count the batch once
    if sample_weight is not None:
        weight = weight * tf.cast(sample_weight, metric.dtype)
    return update_state(_zero_without_rows(values, step), sample_weight=weight)


def _of_loss(
    metric: keras.Metric,
    update_state: Callable,
    step: PaddedStep,
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
) -> object:
    del metric, sample_weight  # all rows that the replica computes on
    return update_state(_zero_without_rows(values, step), sample_weight=step.rows)


def _zero_without_rows(number: tf.Tensor, step: PaddedStep) -> tf.Tensor:
    """Without rows a mean is 0/0, and 0 * NaN would stay in a metric."""
    return tf.where(tf.greater(step.rows, 0), number, tf.zeros_like(number))


def _of_function(
    metric: keras.Metric,
    update_state: Callable,
    step: PaddedStep,
    y_true: object,
    y_pred: object,
    sample_weight: tf.Tensor | None = None,
) -> object:
    _check_rows(metric, step, y_true, y_pred)
    kind, mask = kind_of_metric(metric, y_true, y_pred, sample_weight), get_keras_mask(y_pred)
    function, options = function_of_metric(metric)
    if kind in ("mean", "sum") and mask is None:
        values = by_row(lambda y, own: function(y, own, **options), y_true, y_pred)
        number = tf.reduce_sum(step.without_padding(values))
        if kind == "mean":
            number = tf.math.divide_no_nan(number, tf.cast(step.rows, number.dtype))
        count_once(metric, number, kind, step)
        return None
    if kind != "rows":
        raise ValueError(
            f"Metric '{metric.name}' is a function of all rows of a batch, of which some are "
            f"padding here. {_WAY_OUT}"
        )
    if sample_weight is None and mask is None:
        # A new tensor, without a mask of the function's, which Keras ignores where nothing weighs.
        values = step.without_padding(tf.convert_to_tensor(function(y_true, y_pred, **options)))
        _check_rows(metric, step, values)
        weight = step.weights_of_rows(1, metric.dtype)
        return Mean.update_state(metric, values, sample_weight=weight)
    weight = _weights(sample_weight, step, 1 if mask is None else mask.shape.rank, metric.dtype)
    return update_state(y_true, y_pred, sample_weight=weight)


def _of_rows(
    metric: keras.Metric, update_state: Callable, step: PaddedStep, *args: object, **kw: object
) -> object:
    """Any other metric of Keras's, which all take weights."""
    update = type(metric).update_state
    if not update.__module__.startswith("keras.src.metrics"):
        raise ValueError(
            f"Metric '{metric.name}' ({type(metric).__name__}) counts rows in a way of its own, "
            f"of which some are padding here. {_WAY_OUT}"
        )
    given = inspect.signature(update_state).bind(*args, **kw).arguments
    y_true, y_pred = given["y_true"], given["y_pred"]
    _check_rows(metric, step, y_true, y_pred)
    weight = _weights(given.get("sample_weight"), step, 1, metric.dtype)
    if isinstance(metric, _FLAT):
        labels = y_true if metric.sparse_y_true else y_true[..., 0]
        missing = labels.shape.rank - weight.shape.rank
        weight = tf.reshape(weight, [*weight.shape, *[1] * missing])
        weight = tf.broadcast_to(weight, tf.shape(labels))
    return update_state(y_true, y_pred, sample_weight=weight)


def _weights(
    sample_weight: tf.Tensor | None, step: PaddedStep, rank: int, dtype: tf.DType | str
) -> tf.Tensor:
    if sample_weight is None:
        return step.weights_of_rows(rank, dtype)
    return step.without_padding(tf.cast(sample_weight, dtype))


def _check_rows(metric: keras.Metric, step: PaddedStep, *tensors: tf.Tensor) -> None:
    other = [tensor.shape for tensor in tensors if not step.has_places(tensor)]
    if other:
        raise ValueError(
            f"Metric '{metric.name}' is given tensors of shapes {other} for {step.places} rows, so "
            f"that it is not known what of them is of rows of padding. {_WAY_OUT}"
        )
