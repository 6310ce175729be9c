"""The rows of all replicas, where a computation of one replica needs them.

Every replica has a part of a batch. Together they have what one device has, in the same order:

    replica 0   rows 0..2  \\
    replica 1   rows 3..5   >  rows 0..7, on each of them
    replica 2   rows 6..7  /

What a replica computes of them may also be computed by all others; `all_rows` asks them for their
gradients, `own_rows_live` does not, where it is known that they compute the same.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import keras
import tensorflow as tf

from tfparallel.internals import UnconvertedError, distribute_lib, in_symbolic_scope
from tfparallel.internals.distribute import num_replicas
from tfparallel.replicas.batch import Rows
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step
from tfparallel.replicas.row_trial import check_is_no_trial

Nest = TypeVar("Nest")
_thread = threading.local()


class RowsNeededInFunctionError(UnconvertedError):
    """Rows of all replicas are asked for in a function of the step, which cannot wait for them."""


@contextlib.contextmanager
def own_rows_alone() -> Iterator[None]:
    """Within it, `all_rows` gives what it is given: what is computed is only timed."""
    _thread.has_own_rows_alone = True
    try:
        yield
    finally:
        _thread.has_own_rows_alone = False


def all_rows(strategy: tf.distribute.Strategy, tensors: Nest) -> Nest:
    """The rows of all replicas of each tensor of a nest, `[rows, ...]`; differentiable.

    The gradient of a replica's rows is that of the sum of all replicas' losses.

    Raises:
        RuntimeError: outside of a step that runs on replicas.
        ValueError: for a tensor without rows.
    """
    has_own_alone = getattr(_thread, "has_own_rows_alone", False)
    if num_replicas(strategy) == 1 or in_symbolic_scope() or has_own_alone:
        return tensors
    check_is_no_trial()
    context = distribute_lib.get_replica_context()
    if context is None or context.strategy is not strategy:
        raise RuntimeError(
            "all_rows gathers what replicas have, and is called where they compute: in the "
            "train_step, compute_loss or a layer of a model that `fit` or `evaluate` runs, or in a "
            "function given to strategy.run. Received: a call outside of a step."
        )
    flat = [tf.convert_to_tensor(tensor) for tensor in keras.tree.flatten(tensors)]
    _check_rows(flat)
    live, _ = rows_and_place(flat)
    if isinstance(context, BuildContext):
        live = context.of_all(live)
    return keras.tree.pack_sequence_as(tensors, live)


def rows_and_place(tensors: Sequence) -> tuple[list, tf.Tensor]:
    """`all_rows` of dense tensors of as many rows each, and where the replica's own rows begin.

    They need not be the rows of the batch: a program may have put two views of a batch, or the
    positions of all its rows, one after the other.
    """
    context = distribute_lib.get_replica_context()
    own_count = tf.shape(tensors[0])[:1]
    *gathered, counts = gather_rows([*tensors, own_count])
    number = 0 if isinstance(context, BuildContext) else context.replica_id_in_sync_group
    start = tf.cumsum(counts, exclusive=True)[number]
    live = [
        _with_gradient(rows, own, _gradient_of_all(counts)) if own.dtype.is_floating else rows
        for rows, own in zip(gathered, tensors, strict=True)
    ]
    return live, start


def own_rows_live(tensors: Sequence, step: ReplicaStep, is_weighed: bool = True) -> list:
    """As `all_rows`, for what all replicas compute alike from it, in a Keras step.

    The gradient of each replica's rows is that of its own computation, once, whatever the replica's
    weight, which counts the computation itself. So none has to ask the others.

    Args:
        tensors: `[rows, ...]` each.
        step: that is run.
        is_weighed: whether the replica's weight counts the computation; else it counts once.
    """
    context = distribute_lib.get_replica_context()
    start = _first_row(context, step.rows)

    def gradient(own: tf.Tensor, all_gradients: tf.Tensor) -> tf.Tensor:
        part = _own_part(own, all_gradients, start)
        if not is_weighed:
            return part
        return tf.math.divide_no_nan(part, tf.cast(step.weight, own.dtype))

    return [
        _with_gradient(rows, own, gradient) if own.dtype.is_floating else rows
        for rows, own in zip(gather_rows(tensors), tensors, strict=True)
    ]


def gather_rows(tensors: Sequence) -> list:
    """The rows of all replicas of each tensor `[rows, ...]`; called in a replica context."""
    context = distribute_lib.get_replica_context()
    if isinstance(context, BuildContext):
        return context.all_rows(tensors)
    try:
        return context.strategy.extended._all_rows(list(tensors))
    except RuntimeError as error:
        raise RowsNeededInFunctionError(
            "Replicas exchange rows between the operations of their step, not in a function of its "
            "own within it. Received: a call in a tf.function, tf.cond or loop. Move it out, or "
            "set run_eagerly=True."
        ) from error


def _check_rows(tensors: Sequence) -> None:
    shapes = [tensor.shape for tensor in tensors]
    if any(shape.rank == 0 for shape in shapes):
        raise ValueError(
            f"all_rows takes tensors [rows, ...] of one replica's rows. Received: shapes {shapes}."
        )


def _first_row(context: tf.distribute.ReplicaContext, rows: Rows) -> object:
    """Where this replica's rows of the batch begin among those of all."""
    step = current_replica_step()
    if isinstance(context, BuildContext):
        return 0
    if step is not None and step.first_row is not None:
        return step.first_row
    (all_counts,) = gather_rows([tf.reshape(tf.cast(rows, tf.int32), [1])])
    return tf.cumsum(all_counts, exclusive=True)[context.replica_id_in_sync_group]


def _own_part(own: tf.Tensor, rows: tf.Tensor, start: object) -> tf.Tensor:
    part = rows[start : start + tf.shape(own)[0]]
    return tf.ensure_shape(part, own.shape)


def _with_gradient(rows: tf.Tensor, own: tf.Tensor, gradient: Callable) -> tf.Tensor:
    """`rows`; `own`, which is among them, gets the gradient `gradient(own, gradient of rows)`."""

    @tf.custom_gradient
    def attached(rows: tf.Tensor, own: tf.Tensor) -> tuple:
        return tf.identity(rows), lambda upstream: (None, gradient(own, upstream))

    return attached(rows, own)


def _gradient_of_all(counts: tf.Tensor) -> Callable:
    step = current_replica_step()

    def gradient(own: tf.Tensor, all_gradients: tf.Tensor) -> tf.Tensor:
        if step is None or step.weights_loss:
            return _own_rows_of_sum(own, all_gradients, counts)
        weight = tf.cast(step.weight, own.dtype)  # each replica's gradients get its own at the end
        total = _own_rows_of_sum(own, all_gradients * weight, counts)
        return tf.math.divide_no_nan(total, weight)

    return gradient


def _own_rows_of_sum(own: tf.Tensor, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Of the sum of all replicas' `rows` those that are in the place of `own`: half an all-reduce.

    Args:
        own: this replica's.
        rows: of all replicas, one after the other.
        counts: how many rows each replica has.
    """
    context = distribute_lib.get_replica_context()
    if isinstance(context, BuildContext):
        part = context.own_rows_of_sum(rows)
    else:
        part = context.strategy.extended._own_rows_of_sum(rows, counts)
    return tf.ensure_shape(part, own.shape)
