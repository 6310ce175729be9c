"""A loss with a value for each row: `tape.gradient` adds them up, over the rows of all replicas.

In a `train_step` of a model's own, gradients are weighted by the replica's share of the rows when
they enter the optimizer: right for a mean over rows. A sum over its own rows, which is what a tape
makes of one value for each row, has to be divided by that share first.

The tape is the user's, and its class is nobody's to change. So the variables of a step, which the
tape asks for their handles, tell this file, which then changes what that one call takes gradients
of: the same values, with gradients divided.
"""

import functools
import itertools

import tensorflow as tf

from tfparallel.internals.gradients_asked_for import (
    gradient_asked_for,
    is_asked_without_tape,
    is_followed_forward,
    with_gradient,
)
from tfparallel.replicas.forward_mode import no_forward_mode
from tfparallel.replicas.own_step import RefusedStepError
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step


def told_of_gradient(not_followed: str = "") -> None:
    """Lets gradients of a loss by row be those of all rows, once weighted.

    Called by the property `handle` of a variable, whoever reads it.

    Args:
        not_followed: what the variable is, if no `ForwardAccumulator` can follow it.

    Raises:
        RefusedStepError: where `tf.gradients` reads it, which sees neither parts nor stages; and
            where a `ForwardAccumulator` does, which cannot follow it.
    """
    if not_followed and is_followed_forward():
        raise no_forward_mode(not_followed)
    step = current_replica_step()
    if step is None or step.weights_loss:
        return
    if is_asked_without_tape():
        raise RefusedStepError(
            "A train_step must take gradients by weights with a tf.GradientTape. Received: "
            "tf.gradients, which cannot follow weights that are in parts or on stages."
        )
    asked = gradient_asked_for()
    if asked is None or asked.targets is step.summed_targets:
        return
    tape, targets = asked.tape, asked.targets
    step.has_output_gradients |= asked.has_output_gradients
    step.summed_targets = targets  # the next source of this call changes nothing
    if step.losses is not None:
        step.losses += targets if asked.jacobian_of is None else [asked.jacobian_of]
    divided = functools.partial(_divided, step)
    known = step.by_row[step.num_targets : step.num_targets + len(targets)]
    step.num_targets += len(targets)
    targets[:] = [
        with_gradient(tape, target, divided) if may_be and _is_by_row(target, step.rows) else target
        for target, may_be in itertools.zip_longest(targets, known, fillvalue=True)
    ]
    if step.scale is not None and asked.jacobian_of is None:  # gradients of rows are as they are
        scaled = functools.partial(_scaled, step.scale)
        targets[:] = [
            with_gradient(tape, x, scaled) if tf.is_tensor(x) and x.dtype.is_floating else x
            for x in targets
        ]


def _divided(step: ReplicaStep, gradient: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(gradient, tf.cast(step.weight, gradient.dtype))


def _scaled(scale: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    return gradient * tf.cast(scale, gradient.dtype)


def _is_by_row(value: tf.Tensor, rows: int | tf.Tensor) -> bool:
    """Whether the first dim of `value` is the replica's `rows`, as far as tracing knows."""
    if not tf.is_tensor(value) or not value.shape.rank:
        return False
    known = tf.get_static_value(rows) if tf.is_tensor(rows) else rows
    return value.shape[0] is None or value.shape[0] == known
