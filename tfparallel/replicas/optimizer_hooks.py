"""Gradients meet before an optimizer looks at them.

Keras clips gradients, checks them for overflow and accumulates them first, and reduces them over
replicas last. On one device all of that happens to the whole batch's gradient. So an optimizer
created under our strategies reduces in `apply`, and not again later. Only that instance is changed.
"""

import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import BaseOptimizer, distribute_lib
from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.internals.keras_layers import (
    apply_without_replicas,
    behind,
    step_counter_of,
    trained_by,
)
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.checks import check_trained
from tfparallel.replicas.code_of_keras import is_method_of_keras
from tfparallel.replicas.repeated_rows import added_up
from tfparallel.replicas.replica_step import current_replica_step

_thread = threading.local()
_IN_A_BRANCH = (
    "Replicas sum gradients between the operations of their step, not in a function of its own "
    "within it. Received: an optimizer that is applied in a tf.cond, a loop or a tf.function. To "
    "update every k-th step, apply it in each step and give it gradient_accumulation_steps=k, or "
    "call the loop's body with strategy.run; run_eagerly=True runs branches in Python."
)


@dataclasses.dataclass(frozen=True)
class GradientSource:
    """Whose gradients a replica thread is reducing.

    Attributes:
        optimizer: the one whose `apply` was called.
        variables: the Keras variables of the gradients that are not None, in their order.
    """

    optimizer: BaseOptimizer
    variables: list

    def all_variables(self) -> list:
        """All that the optimizer trains, if it knows already."""
        return list(trained_by(self.optimizer)) or self.variables

    def late_counts(self) -> bool:
        """Whether a gradient is worth as much to the optimizer if it comes a step late."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        return isinstance(inner, keras.optimizers.SGD)  # others divide it by what came before

    def loss_scale(self) -> tf.Tensor | None:
        """What the loss was multiplied with by a `LossScaleOptimizer`; None: by no other factor."""
        unbuilt = getattr(self.optimizer, "initial_scale", None)
        scale = getattr(self.optimizer, "dynamic_scale", unbuilt)
        return None if scale is None else tf.convert_to_tensor(scale, tf.float32)


def gradient_source() -> GradientSource | None:
    """What the calling replica thread is reducing gradients of, inside `_weigh_and_reduce`."""
    return getattr(_thread, "source", None)


def hook_optimizer(optimizer: BaseOptimizer, strategy: tf.distribute.Strategy) -> None:
    """Makes `optimizer` reduce gradients over the replicas of `strategy` before it uses them.

    `optimizer.apply` in a replica context then: weighs the gradients by the replica's rows (inside
    a Keras step), sums them over replicas, and does everything else on every replica alike.
    Elsewhere it does what it always did. Hooking twice changes nothing.
    """
    reduce_then_apply = functools.partial(_reduce_then_apply, optimizer, strategy)
    hook_once(
        optimizer,
        "apply",
        wrapped(optimizer, "apply", reduce_then_apply),
        why="Gradients of all replicas meet before the optimizer clips or checks them.",
    )
    if not type(optimizer).apply_gradients.__module__.startswith("keras.src."):
        hook_once(
            optimizer,
            "apply_gradients",
            wrapped(
                optimizer,
                "apply_gradients",
                functools.partial(_reduce_then_apply_gradients, optimizer, strategy),
            ),
            why="One of a user's own may change gradients: it gets those of all replicas.",
        )
    hook_once(
        optimizer,
        "scale_loss",
        wrapped(optimizer, "scale_loss", _weigh_then_scale),
        why="The loss of Keras's own step is weighted by the replica's rows.",
    )
    hook_once(
        optimizer,
        "_all_reduce_sum_gradients",
        wrapped(optimizer, "_all_reduce_sum_gradients", _unless_reduced),
        why="Gradients that have met are not reduced a second time.",
    )
    hook_once(
        optimizer,
        "build",
        wrapped(optimizer, "build", functools.partial(_check_then_build, optimizer, strategy)),
        why="A model built outside of the scope is refused, before it trains unparallelised.",
    )
    for name, hook in strategy.extended._optimizer_hooks(optimizer).items():
        if not is_method_of_keras(type(optimizer), name):
            continue  # one of a user's own computes something else, with whole gradients
        hook_once(
            optimizer,
            name,
            wrapped(optimizer, name, hook),
            why="What the strategy has an optimizer do otherwise, by its own `_optimizer_hooks`.",
        )


def _check_then_build(
    optimizer: BaseOptimizer,
    strategy: tf.distribute.Strategy,
    build: Callable,
    variables: Sequence,
) -> None:
    check_trained(strategy, optimizer, variables)
    build(variables)


def _reduce_then_apply(
    optimizer: BaseOptimizer,
    strategy: tf.distribute.Strategy,
    apply: Callable,
    grads: Iterable,
    trainable_variables: Iterable[keras.Variable] | None = None,
) -> object:
    context = distribute_lib.get_replica_context()
    if isinstance(context, BuildContext):
        build_optimizer(optimizer, trainable_variables)
        context.gradients += [g for g in grads if g is not None]
        return None
    _count_where_the_counter_is(optimizer)
    if context is None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # Keras refuses: its optimizer would ask the replicas whether all is finite. We have one
        # gradient for all of them here, as any other optimizer has.
        build_optimizer(optimizer, trainable_variables)
        return apply_without_replicas(optimizer, grads, trainable_variables)
    if context is None or context.strategy is not strategy or _is_reduced():
        return apply(grads, trainable_variables)
    grads = list(grads)
    present = [g for g in grads if g is not None]
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    variables = trainable_variables or trained_by(optimizer)
    present_variables = [v for g, v in zip(grads, variables, strict=False) if g is not None]
    _check_are_gradients(strategy, present_variables)
    _thread.source = GradientSource(optimizer, present_variables)
    try:
        totals = strategy.extended._weigh_and_reduce(present)
    except RuntimeError as error:
        if "defining a new graph" not in str(error):
            raise
        raise RuntimeError(_IN_A_BRANCH) from error
    finally:
        _thread.source = None
    reduced = map(added_up, present, totals)
    grads = [None if g is None else next(reduced) for g in grads]
    _thread.is_reduced = True
    try:
        return strategy.extended._apply_reduced(apply, grads, trainable_variables)
    finally:
        _thread.is_reduced = False


def _check_are_gradients(strategy: tf.distribute.Strategy, variables: Sequence) -> None:
    """Refuses variables of which Keras takes the next value for the gradient.

    Raises:
        ValueError: naming one, where there are several replicas.
    """
    replaced = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if replaced and num_replicas(strategy) > 1:
        raise ValueError(
            "Replicas sum gradients. Received: variables whose gradient is their next value, as "
            f"float8 training has them (model.quantize('float8')): '{replaced[0]}', and "
            f"{len(replaced) - 1} more. What it is computed of is a replica's own rows, and no sum "
            "of it is that of all. Train with mixed_bfloat16, or under a strategy of one replica."
        )


def _count_where_the_counter_is(optimizer: BaseOptimizer) -> None:
    counter = step_counter_of(optimizer)
    hook_once(
        counter,
        "assign_add",
        wrapped(counter, "assign_add", functools.partial(_add_in_place, counter)),
        why="Steps are counted where the counter is: no GPU sends the host a copy.",
    )


def _add_in_place(counter: keras.Variable, assign_add: Callable, value: object) -> object:
    if not _is_reduced():  # Keras's own ways of counting, outside of replicas
        return assign_add(value)
    return behind(counter).assign_add(tf.cast(value, counter.dtype))


def _reduce_then_apply_gradients(
    optimizer: BaseOptimizer,
    strategy: tf.distribute.Strategy,
    apply_gradients: Callable,
    grads_and_vars: Iterable,
) -> object:
    pairs = list(grads_and_vars)

    def apply(_: BaseOptimizer, grads: Iterable, variables: Iterable) -> object:
        return apply_gradients(list(zip(grads, variables, strict=True)))

    bound = types.MethodType(apply, optimizer)  # strategies ask whose method it is
    grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
    return _reduce_then_apply(optimizer, strategy, bound, grads, variables)


def build_optimizer(optimizer: BaseOptimizer, variables: Iterable[keras.Variable] | None) -> None:
    """Creates the slots of an optimizer that has none yet."""
    if not optimizer.built and variables is not None:
        with keras.name_scope(optimizer.name, caller=optimizer):  # as `apply` does
            optimizer.build(list(variables))


def _weigh_then_scale(scale_loss: Callable, loss: tf.Tensor) -> tf.Tensor:
    """Weighs a number of the replica's rows; values of rows, which a tape adds up, need nothing."""
    step = current_replica_step()
    if step is not None and step.weights_loss and loss.shape.rank == 0:
        loss = loss * tf.cast(step.weight, loss.dtype)
    return scale_loss(loss)


def _unless_reduced(all_reduce_sum_gradients: Callable, grads_and_vars: Iterable) -> list:
    return list(grads_and_vars) if _is_reduced() else all_reduce_sum_gradients(grads_and_vars)


def _is_reduced() -> bool:
    """Whether the calling replica thread is inside `apply`, with gradients of all replicas."""
    return getattr(_thread, "is_reduced", False)
