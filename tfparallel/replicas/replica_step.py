"""What a replica's thread knows of the Keras step it is running."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import ReduceOp, distribute_lib
from tfparallel.internals.hooks import shadowed, wrapped

_thread = threading.local()


def current_replica_step() -> "ReplicaStep | None":
    """The Keras step that the calling replica thread runs, if it runs one."""
    return getattr(_thread, "step", None)


class ReplicaStep:
    """One replica's share of a Keras step.

    Attributes:
        rows: how many rows this replica computes on, an int or a scalar int32 tensor.
        weight: scalar tensor, `rows` over the rows of all replicas; float64, so that it can be cast
            to the dtype of whatever it weighs, but where XLA compiles for a TPU.
        weights_loss: the loss itself is weighted (the stock `train_step`); else gradients are.
        statistics: variables assigned from this replica's rows only, to be averaged.
        inputs: the replica's part of the batch, a nest of tensors.
        first_row: where `rows` begin among those of all replicas, None where that is not known.
        summed_targets: of the last gradient of the step's own, as `tape_hooks` has changed them.
        has_all_rows: what is computed is of the rows of all replicas, on each of them alike.
    """

    def __init__(
        self,
        rows: int | tf.Tensor,
        weight: tf.Tensor,
        weights_loss: bool,
        statistics: list,
        inputs: object = None,
        first_row: Any = None,
    ):
        self.rows, self.weight, self.inputs, self.first_row = rows, weight, inputs, first_row
        self.weights_loss, self.statistics = weights_loss, statistics
        self.summed_targets: list | None = None
        self.has_all_rows = False

    def weigh_gradient(self, gradient: tf.Tensor | tf.IndexedSlices) -> object:
        """`gradient * weight`, unless the loss already carries the weight."""
        if self.weights_loss:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = self.weigh_gradient(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.math.multiply_no_nan(gradient, tf.cast(self.weight, gradient.dtype))

    def zero_without_rows(self, gradients: list) -> list:
        """`gradients`, or zeros where this replica has no rows: a mean over no rows is NaN."""
        if isinstance(self.rows, int) and self.rows > 0:
            return gradients
        dense = [i for i, g in enumerate(gradients) if not isinstance(g, tf.IndexedSlices)]
        chosen = tf.cond(
            tf.greater(self.rows, 0),
            lambda: [tf.identity(gradients[i]) for i in dense],
            lambda: [tf.zeros_like(gradients[i]) for i in dense],
        )
        result = list(gradients)
        for i, gradient in zip(dense, tf.nest.flatten(chosen), strict=True):
            result[i] = gradient
        return result

    @contextlib.contextmanager
    def with_all_rows(self) -> Iterator[None]:
        """Within it, the replica computes on the rows of all."""
        before, self.has_all_rows = self.has_all_rows, True
        try:
            yield
        finally:
            self.has_all_rows = before

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the step of the calling thread."""
        _thread.step = self
        try:
            with _weighing_backward_of_all_reduce(distribute_lib.get_replica_context(), self):
                yield
        finally:
            _thread.step = None


def all_reduce_gradients(
    context: tf.distribute.ReplicaContext,
    gradients: Sequence[tf.Tensor],
    reduce_op: ReduceOp = ReduceOp.SUM,
) -> list[tf.Tensor]:
    """Reduces what the backward passes of all replicas send to one another.

    Where gradients are weighted only at the end, by the weight of the replica they arrive at, what
    replica j sends to replica i has to carry `w_j / w_i`.
    """
    step = current_replica_step()
    if step is None or step.weights_loss:
        return context.all_reduce(reduce_op, list(gradients))
    sent = [step.weigh_gradient(gradient) for gradient in gradients]
    received = context.all_reduce(reduce_op, sent)
    return [tf.math.divide_no_nan(g, tf.cast(step.weight, g.dtype)) for g in received]


def _weighing_backward_of_all_reduce(
    context: object, step: ReplicaStep
) -> contextlib.AbstractContextManager:
    """Within it, gradients that cross replicas are weighted when they do."""
    if step.weights_loss:
        return contextlib.nullcontext()

    def weighted(
        all_reduce: Callable, reduce_op: object, value: object, options: object = None
    ) -> object:
        flat = tf.nest.flatten(value)
        if any(isinstance(tensor, tf.IndexedSlices) for tensor in flat):
            return all_reduce(reduce_op, value, options)

        @tf.custom_gradient
        def forward(*tensors: tf.Tensor) -> tuple:
            def backward(*gradients: tf.Tensor) -> list:
                return all_reduce_gradients(context, gradients, reduce_op)

            return all_reduce(reduce_op, list(tensors), options), backward

        return tf.nest.pack_sequence_as(value, forward(*flat))

    return shadowed(
        context,
        "all_reduce",
        wrapped(context, "all_reduce", weighted),
        during="a replica's step",
        why="Gradients that cross replicas are weighted when they do.",
    )
