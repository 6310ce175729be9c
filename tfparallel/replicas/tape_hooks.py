"""A loss with a value for each row: `tape.gradient` adds them up, over the rows of all replicas.

In a `train_step` of a model's own, gradients are weighted by the replica's share of the rows when
they enter the optimizer: right for a mean over rows. A sum over its own rows, which is what a tape
makes of one value for each row, has to be divided by that share first.

`GradientTape` has to be told on its class: no hook of ours has made the instance. It is while a
step of ours runs, and only threads of its replicas notice.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step

_stock_gradient = tf.GradientTape.gradient
_lock = threading.Lock()
_num_users = 0


@contextlib.contextmanager
def sums_over_all_rows() -> Iterator[None]:
    """Within it, a tape's gradients of a loss by row are those of all rows, once weighted."""
    _count_users(1)
    try:
        yield
    finally:
        _count_users(-1)


def _count_users(change: int) -> None:
    global _num_users
    with _lock:
        _num_users += change
        tf.GradientTape.gradient = _gradient if _num_users else _stock_gradient


def _gradient(
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    step = current_replica_step()
    if step is not None and not step.weights_loss and _has_variable(sources):
        output_gradients = _undo_weight(step, target, output_gradients)
    return _stock_gradient(tape, target, sources, output_gradients, *args, **kwargs)


def _has_variable(sources: Any) -> bool:
    flat = tf.nest.flatten(sources)
    return any(isinstance(source, (tf.Variable, keras.Variable)) for source in flat)


def _undo_weight(step: ReplicaStep, target: Any, output_gradients: Any) -> list | None:
    """What flows into `target`, divided by the replica's weight where there is a value by row."""
    targets = tf.nest.flatten(target)
    if not any(_is_by_row(value, step.rows) for value in targets):
        return output_gradients
    given = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
    return [
        _divided(step.weight, tf.ones_like(value) if own is None else own)
        if _is_by_row(value, step.rows)
        else own
        for value, own in zip(targets, given, strict=True)
    ]


def _divided(weight: tf.Tensor, gradient: Any) -> tf.Tensor:
    gradient = tf.convert_to_tensor(gradient)
    return tf.math.divide_no_nan(gradient, tf.cast(weight, gradient.dtype))


def _is_by_row(value: Any, rows: Any) -> bool:
    """Whether the first dim of `value` is the replica's `rows`, as far as tracing knows."""
    if not tf.is_tensor(value) or not value.shape.rank:
        return False
    known = tf.get_static_value(rows) if tf.is_tensor(rows) else rows
    return value.shape[0] is None or value.shape[0] == known
