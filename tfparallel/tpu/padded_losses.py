"""A compiled loss on a replica's rows, of which those of padding count nowhere.

It is what `replicas.coupled_losses` makes of a replica's own rows, by the kind of the loss: values
of single rows lose those of padding before they are reduced; a function that gives one number is
computed row by row.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.internals import get_keras_mask, set_keras_mask
from tfparallel.internals.probabilities import origin_of, with_origin
from tfparallel.replicas.coupled_losses import share_of, sum_of_weights, weighed
from tfparallel.replicas.loss_kinds import copy_with_call, kind_of_loss
from tfparallel.tpu.padded_step import PaddedStep, padded_step

_WAY_OUT = (
    "Leave a smaller last batch out (tf.data's batch(drop_remainder=True)), with batches of a "
    "multiple of the number of replicas."
)


def loss_of_real_rows(loss: keras.Loss) -> Callable:
    """`loss` of the rows that are no padding, for a step that weighs it by their share."""

    def on_replica(
        y_true: object, y_pred: object, sample_weight: tf.Tensor | None = None
    ) -> tf.Tensor:
        step = padded_step()
        if step is None:
            return loss(y_true, y_pred, sample_weight)
        _check_rows(loss, step, y_true, y_pred, sample_weight)
        kind = kind_of_loss(loss, y_true, y_pred, sample_weight)
        if kind in ("rows", "masked"):
            return _of_rows(loss, step, y_true, y_pred, sample_weight)
        if kind == "coupled" or get_keras_mask(keras.tree.flatten(y_pred)[0]) is not None:
            raise ValueError(
                f"Loss '{loss.name}' is a function of all rows of a batch, of which some are "
                f"padding here. {_WAY_OUT}"
            )
        values = by_row(loss, y_true, y_pred, sample_weight)
        total = tf.reduce_sum(step.without_padding(values))
        if kind == "mean":
            return tf.math.divide_no_nan(total, tf.cast(step.rows, total.dtype))
        return weighed(total, tf.ones((), total.dtype), step)

    return on_replica


def by_row(function: Callable, *arguments: object) -> tf.Tensor:
    """`[rows]`: what a function of nests of tensors `[rows, ...]` and None gives for each row."""
    flat = keras.tree.flatten(arguments)
    at = [i for i, leaf in enumerate(flat) if leaf is not None]
    origins = [origin_of(flat[i]) for i in at]
    logits = [origin.logits for origin in origins if origin is not None]

    def of_row(rows: list) -> tf.Tensor:
        filled, own_logits = list(flat), iter(rows[len(at) :])
        for i, row, origin in zip(at, rows, origins, strict=False):
            of_row = origin and next(own_logits)[tf.newaxis]
            filled[i] = with_origin(row[tf.newaxis], origin, of_row)
        value = function(*keras.tree.pack_sequence_as(arguments, filled))
        return tf.reshape(tf.convert_to_tensor(value), [])

    return tf.vectorized_map(of_row, [*(tf.convert_to_tensor(flat[i]) for i in at), *logits])


def _of_rows(
    loss: keras.Loss,
    step: PaddedStep,
    y_true: object,
    y_pred: object,
    sample_weight: tf.Tensor | None,
) -> tf.Tensor:
    reduction = getattr(loss, "reduction", "mean")
    if reduction in ("none", None):
        raise ValueError(
            f"Loss '{loss.name}' with reduction={reduction!r} gives values of rows of padding, too."
            f" {_WAY_OUT}"
        )
    masks: list = []

    def call(y_true: object, y_pred: object) -> tf.Tensor:
        values = tf.convert_to_tensor(loss.call(y_true, y_pred))
        if not step.has_places(values):
            raise ValueError(
                f"Loss '{loss.name}' gives values of shape {values.shape} for {step.places} rows, "
                f"so that it is not known which of them are of rows of padding. {_WAY_OUT}"
            )
        mask = _mask_of(values, y_pred, step)
        masks.append(mask)
        values = step.without_padding(values)
        if mask is not None:
            set_keras_mask(values, mask)
        return values

    if sample_weight is not None:
        sample_weight = step.without_padding(tf.convert_to_tensor(sample_weight))
    value = copy_with_call(loss, call)(y_true, y_pred, sample_weight)
    (mask,) = masks
    if reduction == "sum":
        return weighed(value, tf.ones((), value.dtype), step)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        return weighed(value, share_of(sum_of_weights(sample_weight, mask, value.dtype)), step)
    if mask is not None:
        return weighed(value, share_of(tf.reduce_sum(tf.cast(mask, value.dtype))), step)
    return step.mean_over_rows(value)


def _mask_of(values: tf.Tensor, y_pred: object, step: PaddedStep) -> tf.Tensor | None:
    """The mask that predictions or values have, without rows of padding; None without a mask."""
    own = [get_keras_mask(each) for each in (values, y_pred) if isinstance(each, tf.Tensor)]
    present = [tf.cast(mask, tf.bool) for mask in own if mask is not None]
    if not present:
        return None
    mask = present[0] if len(present) == 1 else tf.logical_and(*present)
    return step.without_padding(mask)


def _check_rows(loss: keras.Loss, step: PaddedStep, *arguments: object) -> None:
    tensors = [leaf for leaf in keras.tree.flatten(arguments) if leaf is not None]
    other = [tensor.shape for tensor in tensors if not step.has_places(tensor)]
    if other:
        raise ValueError(
            f"Loss '{loss.name}' is given tensors of shapes {other} for {step.places} rows, so "
            f"that it is not known what of them is of rows of padding. {_WAY_OUT}"
        )
