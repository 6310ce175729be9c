"""What a model does otherwise under our strategies; shadowed on its instance, not on its class.

Losses and metrics count a batch as one device does, though each replica sees a part of it. They are
shadowed only while the step runs on the replicas.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.strategies.added_losses import added_losses_by_replica
from tfparallel.strategies.replica_step import current_replica_step
from tfparallel.tf_internals import Mean, ReduceOp, Sum, TrainerCall, distribute_lib


def build_without_reading(call: TrainerCall, element_spec: Any) -> None:
    """Lets a model be built from what is known of the batches of `call`, as without a strategy.

    Keras would make an iterator, read a batch and throw both away. Then a generator has lost the
    batches that were prefetched, and a dataset or `PyDataset` that differs from epoch to epoch is
    in its second one when training begins.

    Args:
        call: of `fit` or `evaluate`.
        element_spec: of its batches.
    """
    iterator, model = call.epoch_iterator, call.model
    vars(iterator)["_batch_to_build_with"] = batch_of_specs(element_spec)
    stock = type(model)._maybe_symbolic_build

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        batch = getattr(iterator, "_batch_to_build_with", None)
        if batch is not None:
            iterator, data_batch = None, batch
        stock(model, iterator=iterator, data_batch=data_batch)

    vars(model)["_maybe_symbolic_build"] = build


def batch_of_specs(element_spec: Any) -> Any:
    """What Keras can build a model with: specs instead of tensors, None where nothing comes."""
    return keras.tree.map_structure(
        lambda leaf: leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None,
        element_spec,
    )


@contextlib.contextmanager
def hooked(model: keras.Model, extended: Any, global_results: list) -> Iterator[None]:
    """Within it, `model`'s losses are weighted by rows and its metrics' results are global.

    Args:
        model: the model whose step runs.
        extended: `strategy.extended`, which reads metrics.
        global_results: gets every result that a metric gave, the same on all replicas.
    """
    shadows: list[tuple[dict, str]] = []

    def shadow(instance: Any, name: str, function: Callable) -> None:
        vars(instance)[name] = function
        shadows.append((vars(instance), name))

    def in_cross_replica(result: Callable, metrics: Sequence) -> Callable:
        return _in_cross_replica(result, metrics, extended, global_results)

    metrics = model.metrics
    shadow(model, "get_metrics_result", in_cross_replica(model.get_metrics_result, metrics))
    for metric in metrics:
        shadow(metric, "result", in_cross_replica(metric.result, [metric]))
        if type(metric).update_state in (Mean.update_state, Sum.update_state):
            shadow(metric, "update_state", _counting_a_batch_once(metric.update_state))
    try:
        with weighted_losses(model), added_losses_by_replica(model):
            yield
    finally:
        for attributes, name in shadows:
            del attributes[name]


@contextlib.contextmanager
def weighted_losses(model: keras.Model) -> Iterator[None]:
    """Within it, the mean of `model`'s losses weighted by rows is the loss of the whole batch."""
    compile_loss: Any = getattr(model, "_compile_loss", None)
    losses = getattr(compile_loss, "_flat_losses", None)
    if not losses:
        yield
        return
    compile_loss._flat_losses = [
        entry._replace(loss=_weighted_by_rows(entry.loss)) for entry in losses
    ]
    try:
        yield
    finally:
        compile_loss._flat_losses = losses


def _in_cross_replica(
    result: Callable, metrics: Sequence, extended: Any, global_results: list
) -> Callable:
    """`result` computed once from the state of all replicas, the same tensors for each."""

    def compute(_: tf.distribute.Strategy, *args: Any, **kwargs: Any) -> Any:
        with extended._metrics_read_together(metrics):
            return result(*args, **kwargs)

    def merged(*args: Any, **kwargs: Any) -> Any:
        context = distribute_lib.get_replica_context()
        if context is None or current_replica_step() is None:
            return result(*args, **kwargs)
        value = context.merge_call(compute, args, kwargs)
        global_results.extend(keras.tree.flatten(value))
        return value

    return merged


def _counting_a_batch_once(update_state: Callable) -> Callable:
    """A scalar (a batch's loss) counts with the replica's share of rows: the shares add up to 1."""

    def weighted(values: Any, sample_weight: Any = None) -> Any:
        step = current_replica_step()
        if step is not None and tf.convert_to_tensor(values).shape.rank == 0:
            if sample_weight is None:
                sample_weight = step.weight
            # Without rows a mean is 0/0, and 0 * NaN would stay in the metric.
            values = tf.where(tf.greater(step.rows, 0), values, tf.zeros_like(values))
        return update_state(values, sample_weight=sample_weight)

    return weighted


def _weighted_by_rows(loss: Any) -> Callable:
    """`loss` rescaled so that its mean weighted by rows is the loss of the whole batch.

    Means over rows need nothing. A sum is divided by the replica's weight; a mean over something
    else (unmasked positions, sample weights) goes from its own share to the share of rows.
    """

    def weighted(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        step = current_replica_step()
        value = loss(y_true, y_pred, sample_weight)
        if step is None:
            return value
        reduction = getattr(loss, "reduction", "mean")
        mask = getattr(y_pred, "_keras_mask", None)
        is_sum = reduction in ("sum", "none", None)
        if value.shape == (0,) and not is_sum:
            value = tf.reduce_sum(value)  # eagerly, Keras leaves a loss over no rows unreduced
        if is_sum:
            share = tf.ones((), value.dtype)
        elif reduction == "mean_with_sample_weight" and sample_weight is not None:
            share = _share_of(_sum_of_weights(sample_weight, mask, value.dtype))
        elif mask is not None:
            share = _share_of(tf.reduce_sum(tf.cast(mask, value.dtype)))
        else:
            return value
        return value * tf.math.divide_no_nan(share, tf.cast(step.weight, value.dtype))

    return weighted


def _share_of(local: tf.Tensor) -> tf.Tensor:
    """`local` over its sum over all replicas."""
    total = distribute_lib.get_replica_context().all_reduce(ReduceOp.SUM, local)
    return tf.math.divide_no_nan(local, total)


def _sum_of_weights(sample_weight: Any, mask: Any, dtype: tf.DType) -> tf.Tensor:
    """The divisor of Keras's `mean_with_sample_weight`."""
    weights = tf.cast(sample_weight, dtype)
    if mask is not None:
        mask = tf.cast(mask, dtype)
        missing = mask.shape.rank - weights.shape.rank
        weights = tf.reshape(weights, tf.concat([tf.shape(weights), [1] * missing], 0)) * mask
    return tf.reduce_sum(weights)
