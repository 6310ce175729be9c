"""How the gradients of replicas meet: each is weighed by its replica's rows, then added up."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from tfparallel.internals import ReduceOp, distribute_lib, record
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.measure.operation_kinds import REDUCE_SCOPE
from tfparallel.replicas.noise_probe import NoiseProbe, replica_number
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step

Value = TypeVar("Value")


class WeighedGradients(tf.distribute.StrategyExtended):
    """Mixin: gradients of all rows, from those of each replica's rows."""

    _noise_probe: NoiseProbe | None

    def _weigh_and_reduce(self, gradients: list) -> list:
        """Gradients of all rows, from those of this replica's; called in a replica context."""
        step = current_replica_step()
        if step is not None:
            gradients = [weigh_gradient(gradient, step) for gradient in gradients]
        with tf.name_scope(REDUCE_SCOPE):
            reduced = self._reduce_gradients(gradients)
        if self._noise_probe is not None and step is not None:
            own = step.zero_without_rows(self._own_gradients(gradients))
            self._noise_probe.note(step, own, self._sums_to_note(reduced))
        return reduced

    def _own_gradients(self, gradients: list) -> list:
        """Of this replica's rows, where some of `gradients` may be sums already."""
        return gradients

    def _sums_to_note(self, reduced: list) -> list:
        """What of the sums over replicas this one has to note, so that each is noted once."""
        return reduced if replica_number() == 0 else []

    def _reduce_gradients(self, gradients: list) -> list:
        """Sum over replicas of tensors or IndexedSlices; called in a replica context."""
        step = current_replica_step()
        if step is not None:
            gradients = step.zero_without_rows(gradients)
        return self._sum_gradients(gradients) if gradients else []

    def _sum_gradients(self, gradients: list) -> list:
        return self._all_reduce_apart(ReduceOp.SUM, gradients)

    def _use_merge_call(self) -> bool:
        """False: every replica updates its own copies, so optimizers may branch (`ops.cond`)."""
        return False

    def _replica_ctx_all_reduce(
        self, reduce_op: ReduceOp, value: Value, options: object = None
    ) -> Value:
        reduced = self._all_reduce(reduce_op, tf.nest.flatten(value), options)
        # `ReplicaContext.all_reduce` calls this in a `tf.custom_gradient`, which goes through the
        # graph backwards from what it gets to what it gave, and through that of the other replicas
        # to its beginning: each all-reduce again, unless no gradient leads further than this.
        if not any(isinstance(t, tf.IndexedSlices) for t in reduced):
            reduced = [tf.stop_gradient(t) for t in reduced]
        return tf.nest.pack_sequence_as(value, reduced)

    def _all_reduce_apart(self, reduce_op: ReduceOp, tensors: list) -> list:
        """What no tape sees; called in a replica context."""
        with record.stop_recording():
            return self._all_reduce(reduce_op, tensors)

    def _all_reduce(self, reduce_op: ReduceOp, tensors: list, options: object = None) -> list:
        def merge(_: tf.distribute.Strategy, *tensors: tf.distribute.DistributedValues) -> list:
            return self.batch_reduce_to(reduce_op, [(t, t) for t in tensors], options)

        if self._num_replicas_in_sync == 1:
            return tensors
        # An argument of a `tf.function` is on no device yet, and a result goes where its value is.
        tensors = [
            tf.identity(t) if isinstance(t, tf.Tensor) and not t.device else t for t in tensors
        ]
        return distribute_lib.get_replica_context().merge_call(merge, args=tensors)


def weigh_gradient(gradient: tf.Tensor | tf.IndexedSlices, step: ReplicaStep) -> object:
    """`gradient` times the weight of the replica's rows, unless the loss already carries it."""
    if step.weights_loss:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = weigh_gradient(gradient.values, step)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if gradient.dtype == tf.bfloat16:  # of which no GPU has a `MulNoNan`
        return tf.cast(weigh_gradient(tf.cast(gradient, tf.float32), step), tf.bfloat16)
    return tf.math.multiply_no_nan(gradient, tf.cast(step.weight, gradient.dtype))


@contextlib.contextmanager
def active_step(step: ReplicaStep) -> Iterator[None]:
    """Makes `step` that of the calling thread; gradients that cross replicas in it are weighed."""
    context = distribute_lib.get_replica_context()
    with step.active(), _backward_of_all_reduce_weighed(context, step):
        yield


def all_reduce(
    context: tf.distribute.ReplicaContext,
    tensors: Sequence[tf.Tensor],
    reduce_op: ReduceOp = ReduceOp.SUM,
) -> list[tf.Tensor]:
    """`context.all_reduce`, without what makes it differentiable where no tape would see it."""
    has_own = type(context).all_reduce is not tf.distribute.ReplicaContext.all_reduce
    if has_own or record.could_possibly_record():
        return context.all_reduce(reduce_op, list(tensors))
    return context.strategy.extended._all_reduce_apart(reduce_op, list(tensors))


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
        return all_reduce(context, gradients, reduce_op)
    sent = [weigh_gradient(gradient, step) for gradient in gradients]
    received = all_reduce(context, sent, reduce_op)
    return [tf.math.divide_no_nan(g, tf.cast(step.weight, g.dtype)) for g in received]


def _backward_of_all_reduce_weighed(
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
