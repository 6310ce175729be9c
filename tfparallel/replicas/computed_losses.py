"""A `compute_loss` of a user's own, such that on replicas it adds up to the loss of the batch.

The step takes the mean over replicas, weighted by rows, of what it gives. Whether that is what it
gives for all rows, is tried on random rows (`row_trial.py`), for each kind of arguments once:

    such a mean, or values of single rows      a replica computes its own rows
    anything else (a sum, a correlation)       it is called with the rows of all, by each replica

What it has of `super().compute_loss(...)` counts as a mean, which `coupled_losses.py` makes it; and
so do numbers that it is given. Losses that layers have added are those of the replica's rows: as a
term they are right whatever stands beside them.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfparallel.internals import (
    FuncGraph,
    ReduceOp,
    distribute_lib,
    get_keras_mask,
    in_stateless_scope,
    in_symbolic_scope,
    set_keras_mask,
)
from tfparallel.internals.gradients_asked_for import has_own_gradients
from tfparallel.replicas.coupled_losses import (
    any_mean,
    checked_number,
    rows_of_all,
    weighed,
)
from tfparallel.replicas.dependence import reaches
from tfparallel.replicas.loss_kinds import declared_kind
from tfparallel.replicas.own_step import RefusedStepError
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step
from tfparallel.replicas.row_arguments import RowArguments
from tfparallel.replicas.row_trial import (
    GathersRowsError,
    TakesTensorsError,
    TrialOutcome,
    UntriableError,
    found_for,
    trial,
)

_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by model: {arguments: LossOfRows}


@dataclass(frozen=True)
class LossOfRows:
    """What a `compute_loss` is of a batch's rows.

    Attributes:
        kind: "mean", "sum" or "coupled".
        needed: of which arguments the rows of all are needed, by their places.
        has_own_backward: whether a coupled one has a `tf.custom_gradient` of the user's.
    """

    kind: str
    needed: Sequence[int] = ()
    has_own_backward: bool = False


def computed_loss_of_whole_batch(model: keras.Model) -> Callable:
    """`model.compute_loss`, whose mean over replicas, weighted by rows, is the loss of the batch.

    Args:
        model: with a `compute_loss` of its own.
    """
    compute_loss = model.compute_loss
    names = [*inspect.signature(compute_loss).parameters]

    def on_replica(*args: object, **kwargs: object) -> object:
        step = current_replica_step()
        if step is None or step.has_all_rows or in_stateless_scope() or in_symbolic_scope():
            return compute_loss(*args, **kwargs)
        arguments = RowArguments(args, kwargs, step.rows, names, tf.reduce_mean)
        known = _known.setdefault(model, {})
        if arguments.key not in known:
            known[arguments.key] = _tried(model, compute_loss, arguments, step)
        found = known[arguments.key]
        if found.kind == "sum":
            loss = tf.convert_to_tensor(compute_loss(*args, **kwargs))
            return weighed(loss, tf.ones((), loss.dtype), step)
        if found.kind == "mean":
            return compute_loss(*args, **kwargs)
        if found.has_own_backward and step.weights_loss:
            raise RefusedStepError(
                "In Keras's own train_step, what comes back to a compute_loss that is called with "
                "the rows of all replicas is weighed by each replica's rows, and a "
                "tf.custom_gradient in it need not be linear. Received: model "
                f"'{model.name}' ({type(model).__name__}), whose compute_loss couples rows and has "
                "a tf.custom_gradient. Compile it as a loss, or take its gradient in a train_step "
                "of the model's own, of strategy.all_rows(y_pred)."
            )
        if step.tries_backward:
            return sum(any_mean(arguments.leaves[i]) for i in arguments.rows)
        args, kwargs = _of_whole_batch(arguments, found.needed, step)
        with step.with_all_rows():
            check = functools.partial(checked_number, f"A compute_loss, of model '{model.name}',")
            return keras.tree.map_structure(check, compute_loss(*args, **kwargs))

    return on_replica


def declared_kind_of(model: keras.Model) -> str | None:
    """What `model`, or its `compute_loss`, has been declared to be; else None."""
    return declared_kind(model.compute_loss) or declared_kind(model)


def _of_whole_batch(arguments: RowArguments, needed: Sequence[int], step: ReplicaStep) -> tuple:
    """The arguments of one device, where these are of the replica's own rows."""
    leaves = list(arguments.leaves)
    if needed:
        (every,) = rows_of_all(step, [leaves[i] for i in needed])
        for i, rows in zip(needed, every, strict=True):
            leaves[i] = rows
    for i in arguments.numbers:
        if leaves[i].dtype.is_floating:
            leaves[i] = _mean_over_replicas(leaves[i], step)
    return arguments.packed(leaves)


def _mean_over_replicas(number: tf.Tensor, step: ReplicaStep) -> tf.Tensor:
    """The mean, weighted by rows. All compute alike of it, and the step weighs their gradients."""
    present = tf.where(tf.greater(step.rows, 0), number, tf.zeros_like(number))  # else NaN
    share = tf.stop_gradient(present) * tf.cast(step.weight, number.dtype)
    mean = distribute_lib.get_replica_context().all_reduce(ReduceOp.SUM, share)
    return present + tf.stop_gradient(mean - present)


# ---- finding what a loss is ----------------------------------------------------------------------


def _tried(
    model: keras.Model, compute_loss: Callable, arguments: RowArguments, step: ReplicaStep
) -> LossOfRows:
    kind = declared_kind_of(model)
    if kind is None:
        kind = _kind(model, compute_loss, arguments, step)
    if kind != "coupled":
        return LossOfRows(kind)
    return _coupled(model, compute_loss, arguments, step)


def _kind(
    model: keras.Model, compute_loss: Callable, arguments: RowArguments, step: ReplicaStep
) -> str:
    """The kind of a loss; "mean" also if it cannot be tried, or is random.

    What a training step takes gradients of is tried again, with the model (`step_losses.py`).
    """
    if not all(isinstance(x, tf.Tensor) for x in arguments.leaves if tf.is_tensor(x)):
        return "mean"
    if any(isinstance(value, tf.Variable) for value in vars(model).values()):
        return "mean"  # a trial would leave a trace in what is no Keras variable
    is_random = []

    def loss_of(given: Sequence) -> tf.Tensor:
        args, kwargs = arguments.drawn(*given)
        losses = keras.tree.flatten(compute_loss(*args, **kwargs))
        return tf.stack(losses) if len(losses) > 1 else tf.convert_to_tensor(losses[0])

    def outcome(*given: Sequence) -> TrialOutcome:
        loss = loss_of(given)
        is_random.append(not _are_equal(loss, loss_of(given)))
        return TrialOutcome(loss, loss)

    try:
        with trial(), _without_state(model), step.with_all_rows():
            kinds = found_for(outcome, *arguments.specs(), arguments.least_digits()).kinds
    except (GathersRowsError, TakesTensorsError, UntriableError):
        return "mean"
    is_of_own_rows = bool({"mean", "rows"} & kinds) or any(is_random)
    return "mean" if is_of_own_rows else "coupled"


def _are_equal(loss: tf.Tensor, again: tf.Tensor) -> bool:
    return bool(tf.reduce_all((loss == again) | (loss != loss)))


def _coupled(
    model: keras.Model, compute_loss: Callable, arguments: RowArguments, step: ReplicaStep
) -> LossOfRows:
    """Of which rows a coupled loss is computed, and how, by a trace that is thrown away."""
    graph, leaves, targets = FuncGraph("compute_loss"), list(arguments.leaves), []
    try:
        with graph.as_default(), _without_state(model), step.with_all_rows():
            for i in arguments.rows:
                leaves[i] = _placeholder(arguments.leaves[i])
                mask = get_keras_mask(arguments.leaves[i])
                if mask is not None:
                    set_keras_mask(leaves[i], _placeholder(mask))
                targets.append({id(leaves[i]), id(get_keras_mask(leaves[i]))})
            args, kwargs = arguments.packed(leaves)
            losses = keras.tree.flatten(compute_loss(*args, **kwargs))
    except Exception:  # what only Python can run: it may need all of them
        return LossOfRows("coupled", arguments.rows)
    made = [loss for loss in losses if tf.is_tensor(loss)]
    needed = [
        i
        for i, own in zip(arguments.rows, targets, strict=True)
        if any(reaches(loss, own) for loss in made)
    ]
    return LossOfRows("coupled", needed, has_own_gradients(graph, is_stopped=False))


def _without_state(model: keras.Model) -> keras.StatelessScope:
    """Within it, no variable changes, and weights that regularizers read are ones."""
    weights = [weight for weight in model.trainable_weights if weight.regularizer is not None]
    ones = [(weight, tf.ones(weight.shape, weight.dtype)) for weight in weights]
    return keras.StatelessScope(state_mapping=ones, collect_losses=True)


def _placeholder(rows: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder(rows.dtype, [None, *rows.shape[1:]])
