"""What a replica's thread knows of the Keras step it is running."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

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
        by_row: of the targets of all such gradients, in their order, whether they have a value for
            each row, where that is known; a shape tells so too, unless it is so by chance.
        num_targets: how many there have been.
        losses: gets all targets of such gradients, if it is given.
        has_output_gradients: whether the step has said what some such gradient begins with.
        scale: scalar float64 that such gradients are multiplied with, if it is given.
        tries_backward: traced to try what layers do to gradients, of losses that are any means.
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
        self.by_row: Sequence[bool] = ()
        self.num_targets = 0
        self.losses: list | None = None
        self.scale: tf.Tensor | None = None
        self.has_output_gradients = False
        self.tries_backward = False
        self.has_all_rows = False

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
        """Makes this the step of the calling thread; see `weighed_gradients.active_step`."""
        _thread.step = self
        try:
            yield
        finally:
            _thread.step = None
