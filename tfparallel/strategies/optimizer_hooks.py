"""Gradients meet before an optimizer looks at them.

Keras clips gradients, checks them for overflow and accumulates them first, and reduces them over
replicas last. On one device all of that happens to the whole batch's gradient. So an optimizer
created under our strategies reduces in `apply`, and not again later. Only that instance is changed.
"""

import functools
import threading

import tensorflow as tf

from tfparallel.strategies.keras_step import current_replica_step
from tfparallel.tf_internals import BaseOptimizer, ReduceOp, distribute_lib


def hook_optimizer(optimizer: BaseOptimizer, strategy: tf.distribute.Strategy) -> None:
    """Makes `optimizer` reduce gradients over the replicas of `strategy` before it uses them.

    `optimizer.apply` in a replica context then: weighs the gradients by the replica's rows (inside
    a Keras step), sums them over replicas, and does everything else on every replica alike.
    Elsewhere it does what it always did. Hooking twice changes nothing.
    """
    if "apply" in vars(optimizer):
        return
    state = vars(optimizer)
    state["apply"] = functools.wraps(optimizer.apply)(
        functools.partial(_reduce_then_apply, optimizer, strategy, optimizer.apply)
    )
    state["scale_loss"] = functools.wraps(optimizer.scale_loss)(
        functools.partial(_weigh_then_scale, optimizer.scale_loss)
    )
    state["_all_reduce_sum_gradients"] = functools.partial(
        _already_reduced, optimizer._all_reduce_sum_gradients
    )


_reducing = threading.local()


def _reduce_then_apply(optimizer, strategy, apply, grads, trainable_variables=None):
    context = distribute_lib.get_replica_context()
    if context is None or context.strategy is not strategy or _is_reduced():
        return apply(grads, trainable_variables)
    grads, step = list(grads), current_replica_step()
    present = [g for g in grads if g is not None]
    if step is not None:
        present = [step.weigh_gradient(g) for g in present]
    reduced = iter(strategy.extended._reduce_gradients(present))
    grads = [None if g is None else next(reduced) for g in grads]
    _reducing.done = True
    try:
        return apply(grads, trainable_variables)
    finally:
        _reducing.done = False


def _weigh_then_scale(scale_loss, loss):
    step = current_replica_step()
    if step is not None and step.weights_loss:
        loss = loss * tf.cast(step.weight, loss.dtype)
    return scale_loss(loss)


def _already_reduced(all_reduce_sum_gradients, grads_and_vars):
    return list(grads_and_vars) if _is_reduced() else all_reduce_sum_gradients(grads_and_vars)


def _is_reduced() -> bool:
    """Whether the calling replica thread is inside `apply`, with gradients of all replicas."""
    return getattr(_reducing, "done", False)
