"""Cross entropy and accuracy of logits in parts: no device has those of the whole vocabulary.

Of each position a device sends the largest of its logits, the sum of their exponentials, and the
one that the label names, if it is one of its own:

    loss = log( sum_i sum exp(x_i - m) ) - (x_label - m)        m: the largest of all

So it is for `SparseCategoricalCrossentropy(from_logits=True)` and `"accuracy"` of a compiled model,
with masks, weights and `ignore_class`. Any other loss or metric reads the whole.

Source: the vocabulary-parallel cross entropy of Megatron-LM, https://arxiv.org/abs/1909.08053
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import record, set_keras_mask
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import (
    compiled_metrics_of,
    function_of_metric,
    losses_asked_for,
    options_of_loss,
)
from tfparallel.replicas.coupled_metrics import is_of_function
from tfparallel.tensor_parallel.computing_groups import ComputingGroups
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import computes_in_parts
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.rules.embedding import index_checks

_CROSSENTROPY = keras.losses.sparse_categorical_crossentropy
_ACCURACY = keras.metrics.sparse_categorical_accuracy


@contextlib.contextmanager
def logits_in_parts(model: keras.Model, extended: ComputingGroups) -> Iterator[None]:
    """Within it, losses and metrics of `model` take logits in parts as they are."""
    with contextlib.ExitStack() as hooks:
        for loss in losses_of_logits(model):
            by_parts = wrapped(loss, "call", functools.partial(_loss, extended, loss))
            hooks.enter_context(_by_devices(loss, "call", by_parts))
        for metric, value in _metrics(model):
            function, _ = function_of_metric(metric)
            by_parts = functools.wraps(function)(functools.partial(value, extended, function))
            hooks.enter_context(_by_devices(metric, "_fn", by_parts))
        yield


@contextlib.contextmanager
def _by_devices(asked: keras.Loss | keras.Metric, name: str, by_parts: Callable) -> Iterator[None]:
    with shadowed(
        asked,
        name,
        by_parts,
        during="a step",
        why="A loss or metric of logits in parts is computed by the devices that have them.",
    ):
        yield


def losses_of_logits(model: keras.Model) -> list:
    """The compiled losses that take logits in parts."""
    losses = [getattr(each, "unstaged", each) for each in losses_asked_for(model)]
    of_class = [x for x in losses if isinstance(x, keras.losses.SparseCategoricalCrossentropy)]
    stock = keras.losses.SparseCategoricalCrossentropy.call
    return [x for x in of_class if type(x).call is stock and options_of_loss(x).get("from_logits")]


def _metrics(model: keras.Model) -> list[tuple[keras.Metric, Callable]]:
    """Those that are computed in parts, each once, and how."""
    compiled = getattr(compiled_metrics_of(model), "metrics", ())
    found = {}
    for metric in [*model.metrics, *compiled]:
        function = function_of_metric(metric)[0] if is_of_function(metric) else None
        if function is _ACCURACY:
            found[id(metric)] = metric, _accuracy
        elif function is _CROSSENTROPY:
            found[id(metric)] = metric, _crossentropy
    return list(found.values())


def _loss(
    extended: ComputingGroups, loss: object, original: Callable, y_true: object, y_pred: object
) -> tf.Tensor:
    """`SparseCategoricalCrossentropy.call`."""
    return _crossentropy(
        extended,
        lambda *given, **_: original(*given),
        y_true,
        y_pred,
        **options_of_loss(loss),
    )


def _crossentropy(
    extended: ComputingGroups,
    original: Callable,
    y_true: tf.Tensor,
    y_pred: tf.Tensor,
    from_logits: bool = False,
    ignore_class: int | None = None,
    axis: int = -1,
) -> tf.Tensor:
    """`keras.losses.sparse_categorical_crossentropy`; `[rows, ...]`."""
    options = {"from_logits": from_logits, "ignore_class": ignore_class, "axis": axis}
    found = _group_and_rows(extended, y_pred)
    if found is None or not from_logits or axis not in (-1, y_pred.shape.rank - 1):
        return original(y_true, y_pred, **options)
    labels = _labels(y_true, y_pred)
    if ignore_class is None:
        return _of_labels(*found, labels, y_pred, tf.ones_like(labels, tf.bool))
    counts = labels != ignore_class
    values = _of_labels(*found, tf.where(counts, labels, 0), y_pred, counts)
    values = tf.where(counts, values, tf.zeros_like(values))
    set_keras_mask(values, counts)
    return values


def _group_and_rows(extended: ComputingGroups, y_pred: object) -> tuple[Group, Rows] | None:
    """The group that has `y_pred` in parts along its last dim, and how; else None."""
    if not isinstance(y_pred, tf.Tensor) or not computes_in_parts(extended):
        return None
    group = Group(extended.own_group())
    rows = group.known_rows(y_pred)
    return None if rows is None or rows.dim != y_pred.shape.rank - 1 else (group, rows)


def _labels(y_true: object, y_pred: tf.Tensor) -> tf.Tensor:
    """`[rows, ...]`, without the last dim of size 1 that labels may have."""
    labels = tf.convert_to_tensor(y_true)
    if labels.shape.rank == y_pred.shape.rank:
        labels = tf.squeeze(labels, -1)
    return tf.cast(labels, tf.int64)


def _of_labels(
    group: Group, rows: Rows, labels: tf.Tensor, logits: tf.Tensor, counts: tf.Tensor
) -> tf.Tensor:
    """The cross entropy where `counts`, anything finite elsewhere."""
    parts = group.parts(logits, rows)
    parts = group.compute(lambda x, c: tf.where(c[..., None], x, tf.zeros_like(x)), parts, counts)
    with record.stop_recording():
        largest = _largest(group, group.compute(lambda x: tf.reduce_max(x, -1), parts))

    def own(x: tf.Tensor, start: tf.Tensor, labels: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
        """`[2, rows, ...]`: the sum of exponentials, and the label's logit or 0."""
        x = x - largest[..., None]
        is_own = (labels >= start) & (labels < start + x.shape[-1])
        index = tf.where(is_own, labels - start, 0)
        named = tf.reshape(_of_each_row(x, index), tf.shape(index))
        # Without `keepdims` its gradient has a GPU send sizes to the host.
        sums = tf.reduce_sum(tf.exp(x), -1, keepdims=True)[..., 0]
        return tf.stack([sums, tf.where(is_own, named, tf.zeros_like(named))])

    starts = [tf.constant(start, tf.int64) for start in rows.starts]
    checks = index_checks(group, labels, sum(rows.sizes))
    with tf.control_dependencies(checks):
        sums, named = tf.unstack(group.summed(group.compute(own, parts, starts, labels, largest)))
    values = tf.math.log(sums) - named
    if checks:
        return values
    is_known = (labels >= 0) & (labels < sum(rows.sizes))
    return values * tf.where(is_known, tf.ones_like(values), np.nan)  # as its gradient then is


def _of_each_row(x: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Of `[rows, ..., classes]` the class that `index`, `[rows, ...]`, names; `[rows * ...]`.

    As `tf.gather(batch_dims=)`, whose gradient has a GPU send sizes to the host.
    """
    flat = tf.reshape(x, [-1, x.shape[-1]])
    numbers = tf.cast(tf.range(tf.shape(flat)[0]), index.dtype)
    return tf.gather_nd(flat, tf.stack([numbers, tf.reshape(index, [-1])], 1))


def _largest(group: Group, values: list[tf.Tensor]) -> tf.Tensor:
    with tf.device(group.devices[0]):
        return functools.reduce(tf.maximum, group.met(values))


def _accuracy(
    extended: ComputingGroups, original: Callable, y_true: tf.Tensor, y_pred: tf.Tensor
) -> tf.Tensor:
    """`keras.metrics.sparse_categorical_accuracy`; of equal logits, the first counts."""
    found = _group_and_rows(extended, y_pred)
    if found is None:
        return original(y_true, y_pred)
    group, rows = found
    with record.stop_recording():
        parts = group.parts(y_pred, rows)
        values = group.compute(lambda x: tf.reduce_max(x, -1), parts)
        indices = group.compute(
            lambda x, start: tf.argmax(x, -1) + start,
            parts,
            [tf.constant(start, tf.int64) for start in rows.starts],
        )
        with tf.device(group.devices[0]):
            values, indices = group.met(values), group.met(indices)
            largest, index = values[0], indices[0]
            for value, other in zip(values[1:], indices[1:], strict=True):
                index = tf.where(value > largest, other, index)
                largest = tf.maximum(value, largest)
            is_right = tf.cast(index == _labels(y_true, y_pred), y_pred.dtype)
            of_two = tf.stack([is_right, 1 - is_right], -1)  # whose first class is the right one
            return original(tf.zeros_like(y_true), of_two)
