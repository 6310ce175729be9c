"""A compiled loss on a replica's rows, such that it adds up to the loss of the whole batch.

The step weighs every replica's loss by its share of rows, which makes the mean of all. A mean over
rows needs nothing else; any other loss is rescaled for it, or computed from the rows of all
replicas (`loss_kinds.py` tells which).
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import ReduceOp, distribute_lib, get_keras_mask, set_keras_mask
from tfparallel.internals.probabilities import origin_of, with_origin
from tfparallel.replicas.all_rows import own_rows_live
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.loss_kinds import (
    declared_kind,
    has_own_backward,
    kind_of_loss,
    number_and_values,
)
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step
from tfparallel.replicas.row_trial import is_trial


def loss_of_whole_batch(loss: Any) -> Callable:
    """`loss` rescaled so that its mean over replicas, weighted by rows, is that of the batch.

    Args:
        loss: a `keras.Loss`, perhaps as a stage of a pipeline (`staged_losses.py`).
    """
    plain = getattr(loss, "unstaged", loss)

    def on_replica(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        step = current_replica_step()
        if step is None:
            return loss(y_true, y_pred, sample_weight)
        if is_trial() or step.tries_backward:  # of a `compute_loss` that this is a part of
            return any_mean(y_pred)
        if step.has_all_rows:
            return plain(y_true, y_pred, sample_weight)
        kind = kind_of_loss(plain, y_true, y_pred, sample_weight)
        if kind == "coupled":
            value = _of_all_rows(plain, step, y_true, y_pred, sample_weight)
            checked_number(f"A loss, here '{plain.name}',", value)
            return value
        if kind == "masked":
            value, values = number_and_values(plain, y_true, y_pred, sample_weight)
            mask = _both(get_keras_mask(y_pred), get_keras_mask(values))
            return _of_rows(plain, value, sample_weight, mask, step)
        value = loss(y_true, y_pred, sample_weight)
        if kind == "rows":
            return _of_rows(plain, value, sample_weight, get_keras_mask(y_pred), step)
        if kind == "mean":
            return _as_declared(plain, value)
        return weighed(value, tf.ones((), value.dtype), step)

    return on_replica


def _as_declared(loss: object, value: tf.Tensor) -> tf.Tensor:
    """`value` of a mean; one that is declared so is not tried where a step is."""
    context = tf.distribute.get_replica_context()
    if isinstance(context, BuildContext) and declared_kind(loss) is not None:
        return context.of_all(value)
    return value


def any_mean(y_pred: object) -> tf.Tensor:
    """A mean over rows, as which a loss counts where what stands beside or before it is tried.

    Its slopes are between 0 and 1, which float16 holds, and it has some for unit vectors, too.
    """
    first = tf.cast(keras.tree.flatten(y_pred)[0], keras.config.floatx())
    return tf.reduce_mean(tf.math.softplus(first))


def checked_number(what: str, loss: object) -> object:
    """`loss`, unless it is values of the rows of all replicas, which each would add up.

    Raises:
        ValueError: if it is, naming `what` gives it.
    """
    if isinstance(loss, tf.Tensor) and loss.shape.rank != 0:
        raise ValueError(
            f"{what} that couples the rows of a batch is called with those of all replicas, and "
            f"must return numbers. Received: a tensor of shape {loss.shape}. Return its mean, or "
            "its sum."
        )
    return loss


def _of_all_rows(
    loss: keras.Loss,
    step: ReplicaStep,
    y_true: object,
    y_pred: object,
    sample_weight: tf.Tensor | None,
) -> tf.Tensor:
    """A coupled loss, whose own backward pass, if it has one, gets what it gets on one device."""
    if not step.weights_loss or not has_own_backward(loss, y_true, y_pred, sample_weight):
        return loss(*rows_of_all(step, y_true, y_pred, sample_weight))
    value = loss(*rows_of_all(step, y_true, y_pred, sample_weight, is_weighed=False))

    @tf.custom_gradient
    def unweighed(value: tf.Tensor) -> tuple:
        weight = tf.cast(step.weight, value.dtype)
        return tf.identity(value), lambda upstream: tf.math.divide_no_nan(upstream, weight)

    return unweighed(value)


def rows_of_all(step: ReplicaStep, *arguments: Any, is_weighed: bool = True) -> tuple:
    """`arguments`, nests of tensors and None, of the rows of all replicas.

    They have their Keras masks, and losses find the logits of probabilities. For a computation that
    all replicas do alike; `is_weighed` as `all_rows.own_rows_live` takes it.
    """
    flat = keras.tree.flatten(arguments)
    tensors = [tf.convert_to_tensor(leaf) for leaf in flat if leaf is not None]
    origins, masks = [origin_of(x) for x in tensors], [get_keras_mask(x) for x in tensors]
    others = [origin.logits for origin in origins if origin is not None]
    others += [mask for mask in masks if mask is not None]
    gathered = own_rows_live([*tensors, *others], step, is_weighed)
    rest = iter(gathered[len(tensors) :])
    pairs = zip(gathered, origins, strict=False)
    every = [with_origin(x, origin, origin and next(rest)) for x, origin in pairs]
    for tensor, mask in zip(every, masks, strict=True):
        if mask is not None:
            set_keras_mask(tensor, next(rest))
    own = iter(every)
    filled = [None if leaf is None else next(own) for leaf in flat]
    return tuple(keras.tree.pack_sequence_as(arguments, filled))


def _of_rows(loss: Any, value: Any, sample_weight: Any, mask: Any, step: ReplicaStep) -> tf.Tensor:
    """`value`, that `loss` has reduced from values of this replica's rows.

    Means over rows need nothing, nor do values of rows. A sum is divided by the replica's weight; a
    mean over something else (unmasked positions, sample weights) goes from its own share to the
    share of rows.
    """
    reduction = getattr(loss, "reduction", "mean")
    is_sum = reduction in ("sum", "none", None)
    if value.shape == (0,) and not is_sum:
        value = tf.reduce_sum(value)  # eagerly, Keras leaves a loss over no rows unreduced
    if is_sum:
        is_number = value.shape.rank == 0
        return weighed(value, tf.ones((), value.dtype), step) if is_number else value
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        return weighed(value, share_of(sum_of_weights(sample_weight, mask, value.dtype)), step)
    if mask is not None:
        return weighed(value, share_of(tf.reduce_sum(tf.cast(mask, value.dtype))), step)
    return value


def weighed(value: tf.Tensor, share: tf.Tensor, step: ReplicaStep) -> tf.Tensor:
    """`value`, that counts with `share`, for a step that counts it with the replica's weight."""
    return value * tf.math.divide_no_nan(share, tf.cast(step.weight, value.dtype))


def share_of(local: tf.Tensor) -> tf.Tensor:
    """`local` over its sum over all replicas."""
    total = distribute_lib.get_replica_context().all_reduce(ReduceOp.SUM, local)
    return tf.math.divide_no_nan(local, total)


def sum_of_weights(sample_weight: Any, mask: Any, dtype: tf.DType) -> tf.Tensor:
    """The divisor of Keras's `mean_with_sample_weight`."""
    weights = tf.cast(sample_weight, dtype)
    if mask is not None:
        mask = tf.cast(mask, dtype)
        missing = mask.shape.rank - weights.shape.rank
        weights = tf.reshape(weights, tf.concat([tf.shape(weights), [1] * missing], 0)) * mask
    return tf.reduce_sum(weights)


def _both(mask: Any, other: Any) -> Any:
    if mask is None or other is None:
        return mask if other is None else other
    return tf.logical_and(mask, other)
