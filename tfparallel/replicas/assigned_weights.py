"""Variables that a step of a user's own assigns itself: only what is then as on one device.

A replica has some rows of a batch. What it assigns of them is another value on each replica:

    assigned of own rows                      then
    ----------------------------------------  -----------------------------------------------------
    to a weight: `weight.assign_sub(...)` of  refused: copies would drift apart
    a gradient; to an optimizer's variable
    to other state, a mean over rows          the mean of the replicas' values, weighted by rows
    to other state, anything else: a queue    refused: no mean of the replicas' values is that of
    of rows, a ratio of sums, a count         one device

Whether a value depends on rows is read off the graph in which the step is traced before it runs
(`step_build.py`); whether it is a mean over them is tried on random rows (`row_trial.py`). What is
computed of the rows of all, by `all_rows` or a reduction, does not count as dependent: it is the
same everywhere. What layers assign when they are called has rules of its own
(`whole_batch_layers.py`).
"""

from collections.abc import Callable, Iterator, Mapping

import keras
import tensorflow as tf

from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.keras_layers import behind, layers_of, own_state, own_weights
from tfparallel.replicas.dependence import Assignment
from tfparallel.replicas.local_copies import assigned_here
from tfparallel.replicas.model_optimizers import optimizers_of
from tfparallel.replicas.own_step import RefusedStepError, StepOfOwnRows
from tfparallel.replicas.row_trial import UntriableError
from tfparallel.replicas.variables import ReplicatedVariable

_WAY_OUT = (
    "compute what is assigned from the rows of all replicas (strategy.all_rows), or from sums over "
    "them (tf.distribute.get_replica_context().all_reduce)."
)


def check_assigned_weights(
    model: keras.Model, step: StepOfOwnRows, of_any_rows: Callable[[], StepOfOwnRows | None]
) -> None:
    """Refuses a step that assigns what depends on a replica's own rows, where that is not right.

    Args:
        model: whose step has been traced.
        step: as it was.
        of_any_rows: traces it once more, for any number of rows: what depends on that number alone
            shows then. None if it cannot.

    Raises:
        RefusedStepError: naming the variable.
    """
    if num_replicas(step.context.strategy) == 1:
        return
    weights, states = dict(_weights(model)), _states(model)
    optimizers = dict(_variables_of_optimizers(model))
    if not any(each.handle in (*weights, *states, *optimizers) for each in step.assignments()):
        return
    if not step.context.strategy.extended._sees_what_a_step_assigns:
        _check_is_not_read_again(model, step, weights)
    step = of_any_rows() or step
    refused = {**weights, **optimizers}
    for each in step.assignments():
        if each.depends and each.handle in refused:
            raise RefusedStepError(
                "A train_step must not assign to a weight what depends on the rows of the batch: "
                "each replica has some of them, and its copy would become another one. Received: "
                f"{_named(step, model)} assigns such a value to '{refused[each.handle]}'. Give "
                f"gradients to an optimizer; or {_WAY_OUT}"
            )
        if each.depends and each.handle in states:
            _check_state(model, step, each, *states[each.handle])


def _check_state(
    model: keras.Model,
    step: StepOfOwnRows,
    assignment: Assignment,
    path: str,
    variable: tf.Variable,
) -> None:
    if assignment.is_inside or not _is_mean(step, assignment):
        what = "in a branch, a loop or a function assigns" if assignment.is_inside else "assigns"
        raise RefusedStepError(
            "What a train_step assigns of the rows of the batch to a variable must be a mean over "
            "rows, outside of branches, loops and functions: each replica has some of the rows, "
            f"and the mean of theirs is kept. Received: {_named(step, model)} {what} something "
            f"else, such as a queue of rows, a sum or a ratio of sums, to '{path}'. Let it "
            f"{_WAY_OUT}"
        )
    if isinstance(variable, ReplicatedVariable):
        variable._is_statistics = True


def _check_is_not_read_again(
    model: keras.Model, step: StepOfOwnRows, weights: Mapping[int, str]
) -> None:
    """Refuses a step that computes with a weight that it has assigned itself."""
    assigned = {each.operation: each.handle for each in step.assignments()}
    outer = {id(inner): id(outer) for outer, inner in step.graph.captures}
    done: set[int] = set()
    for operation in step.graph.get_operations():
        if operation in assigned:
            done.add(assigned[operation])
            continue
        read = {outer[id(x)] for x in operation.inputs if id(x) in outer}
        again = read & done & weights.keys()
        if again and not operation.type.startswith("Assign"):
            raise RefusedStepError(
                "Where a stage has its weights in parts or shards, a step must not compute with a "
                "weight after it has assigned it: the stage reads its weights once in a step. "
                f"Received: {_named(step, model)} does so with '{weights[again.pop()]}'. Use "
                "stages of one device, without shards, or replicas without stages."
            )


def _named(step: StepOfOwnRows, model: keras.Model) -> str:
    return f"{type(step.context.strategy).__name__}, and a step of model '{model.name}' that"


def _weights(model: keras.Model) -> Iterator[tuple[int, str]]:
    """The ids of the handles, and the paths, of what optimizers train in `model`."""
    for layer in layers_of(model):
        for weight in own_weights(layer):
            for copy in assigned_here(behind(weight)):
                yield id(copy.handle), weight.path


def _variables_of_optimizers(model: keras.Model) -> Iterator[tuple[int, str]]:
    """The ids of the handles, and the paths, of rates, slots and counters."""
    for optimizer in optimizers_of(model):
        for variable in optimizer.variables:
            for copy in assigned_here(behind(variable)):
                yield id(copy.handle), f"{optimizer.name}/{variable.name}"


def _states(model: keras.Model) -> dict[int, tuple[str, tf.Variable]]:
    """Other variables of `model` that a step may assign, by the ids of their handles."""
    found = {}
    for layer in layers_of(model):
        own = [(state.path, behind(state)) for state in own_state(layer)]
        own += [
            (f"{layer.name}.{name}", variable)
            for name, value in vars(layer).items()
            for variable in _variables_in(value)
        ]
        for path, variable in own:
            for copy in assigned_here(variable):
                found[id(copy.handle)] = path, variable
    return found


def _variables_in(value: object) -> Iterator[tf.Variable]:
    """Those of TensorFlow that an attribute is, or holds in lists and dictionaries."""
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _variables_in(each)


def _is_mean(step: StepOfOwnRows, assignment: Assignment) -> bool:
    """Whether the mean over replicas of what they assign, weighted by rows, is that of all rows."""
    operation = assignment.operation
    value = operation.inputs[1]  # behind the variable
    if not operation.type.startswith("Assign") or not value.dtype.is_floating:
        return False
    try:
        return "mean" in step.kinds_of(value)
    except UntriableError:
        return False
