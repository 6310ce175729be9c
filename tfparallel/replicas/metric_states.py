"""A metric with an update of a user's own: its state is that of one device, whatever it keeps.

Copies of a metric's state on replicas are added up when it is read. That is right if an update adds
something to the state, and for all rows the sum of what it adds for parts of them: so do Keras's
metrics. Another one may keep a maximum, the last value, a moving average, or count batches:

    what an update adds                     updated
    --------------------------------------  ------------------------------------------------------
    a sum over rows, whatever the state     by each replica with its own rows; copies are added up
    anything else                           by the first replica with the rows of all; the other
                                            copies are 0

Which one it is, is tried on random rows (`row_trial.py`), for each kind of arguments once. What has
no rows, a number of a batch, counts with the first of these as a sum, with the second as a mean.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import (
    ReduceOp,
    distribute_lib,
    in_stateless_scope,
    in_symbolic_scope,
    values_util,
)
from tfparallel.replicas.batch import Rows
from tfparallel.replicas.coupled_losses import rows_of_all
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step
from tfparallel.replicas.row_arguments import RowArguments
from tfparallel.replicas.row_trial import (
    GathersRowsError,
    TakesTensorsError,
    UntriableError,
    adds_up,
    trial,
)

_NAMES = "y_true", "y_pred", "sample_weight"
_adding: Any = weakref.WeakKeyDictionary()  # by metric: {arguments: whether an update adds}


def has_own_update(metric: keras.Metric) -> bool:
    """Whether a class that is not Keras's says how `metric` is updated."""
    return not type(metric).update_state.__module__.startswith("keras.src.")


def update_with_all_rows(metric: keras.Metric) -> Callable:
    """`metric.update_state`, such that its state is that of one device.

    Args:
        metric: which `has_own_update`.
    """
    update_state = metric.update_state

    def on_replica(*args: object, **kwargs: object) -> object:
        step = current_replica_step()
        if step is None or step.has_all_rows or in_stateless_scope() or in_symbolic_scope():
            return update_state(*args, **kwargs)
        arguments = update_arguments(args, kwargs, step.rows)
        if is_adding(metric, arguments):
            return update_state(*args, **kwargs)
        args, kwargs = _of_whole_batch(metric, arguments, step)
        if tf.executing_eagerly() and not _own_variables(metric) and _number_in_process() > 0:
            return None  # what it keeps in Python is one for all replicas
        with step.with_all_rows():
            return update_state(*args, **kwargs)

    return on_replica


def update_arguments(args: tuple, kwargs: dict, count: Rows | None) -> RowArguments:
    """What a metric is updated with on a replica of `count` rows; `RowArguments` says more.

    Numbers are of parts that are added up.
    """
    names = ("y_pred",) if len(args) == 1 else _NAMES  # as `Mean` takes values
    return RowArguments(args, kwargs, count, names, tf.reduce_sum)


def _of_whole_batch(metric: keras.Metric, arguments: RowArguments, step: ReplicaStep) -> tuple:
    """The arguments of one device, where these are of the replica's own rows."""
    leaves = list(arguments.leaves)
    if arguments.rows:
        (every,) = rows_of_all(step, [leaves[i] for i in arguments.rows])
        for i, rows in zip(arguments.rows, every, strict=True):
            leaves[i] = rows
    for i in arguments.numbers:
        leaves[i] = _mean_over_replicas(metric, leaves[i], step)
    return arguments.packed(leaves)


def _mean_over_replicas(metric: keras.Metric, number: tf.Tensor, step: ReplicaStep) -> tf.Tensor:
    """What a number of a replica's rows is for all: a mean over rows, as what a step returns."""
    if not number.dtype.is_floating:
        raise ValueError(
            f"Metric '{metric.name}' ({type(metric).__name__}) must add up what it is given, or be "
            "given rows: each replica has some rows of the batch, and a metric may keep anything "
            f"else of those of all. Received: a {number.dtype.name} of each replica. Give it rows; "
            "or a floating-point number, which is taken for a mean over rows."
        )
    present = tf.where(tf.greater(step.rows, 0), number, tf.zeros_like(number))  # else NaN
    weighted = present * tf.cast(step.weight, number.dtype)
    return distribute_lib.get_replica_context().all_reduce(ReduceOp.SUM, weighted)


def _number_in_process() -> int:
    return values_util.get_current_replica_id_as_int() or 0


# ---- finding what an update does -----------------------------------------------------------------


def is_adding(metric: keras.Metric, arguments: RowArguments) -> bool:
    """Whether an update with such arguments adds a sum over rows to the state of `metric`."""
    known = _adding.setdefault(metric, {})
    if arguments.key not in known:
        known[arguments.key] = _tried(metric, arguments)
    return known[arguments.key]


def _tried(metric: keras.Metric, arguments: RowArguments) -> bool:
    if any(isinstance(x, tf.RaggedTensor | tf.SparseTensor) for x in arguments.leaves):
        tf.get_logger().warning(
            "Metric '%s' is given ragged or sparse tensors, and cannot be tried: its state is "
            "taken for a sum over rows. One that keeps anything else is wrong.",
            metric.name,
        )
        return True
    if not metric.variables or _own_variables(metric):
        return False  # a trial would leave a trace in what is no Keras variable
    if tf.executing_eagerly() and _keeps_values_in_python(metric):
        return False

    def update(*given: Sequence) -> tuple:
        args, kwargs = arguments.drawn(*given)
        return _states(metric, args, kwargs)

    step = current_replica_step()
    alone = contextlib.nullcontext() if step is None else step.with_all_rows()
    try:
        with trial(), alone, _attributes_kept(metric):
            return adds_up(update, *arguments.specs(), computed_in=arguments.least_digits())
    except GathersRowsError:
        return True  # by itself
    except (TakesTensorsError, UntriableError) as error:
        tf.get_logger().warning(
            "Metric '%s' cannot be tried on random rows (%r). It is updated with the rows of all "
            "replicas, which is right for any metric.",
            metric.name,
            error.__cause__,
        )
        return False


def _states(metric: keras.Metric, args: tuple, kwargs: dict) -> tuple[list, list, list]:
    """The values of the metric's variables when it is reset, after an update, and after another.

    What they are now differs between workers, which have to find the same.
    """
    zeros = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
    pairs = list(zip(metric.variables, zeros, strict=True))
    with keras.StatelessScope(state_mapping=pairs) as scope:
        metric.reset_state()
    start = [scope.get_current_value(v) for v in metric.variables]
    once = metric.stateless_update_state(start, *args, **kwargs)
    twice = metric.stateless_update_state(once, *args, **kwargs)
    start, once, twice = (
        [np.asarray(tf.cast(value, tf.float64)) for value in each] for each in (start, once, twice)
    )
    return start, once, twice


def _own_variables(metric: keras.Metric) -> bool:
    """Whether `metric` has variables of TensorFlow, of which Keras does not know."""
    return any(isinstance(value, tf.Variable) for value in vars(metric).values())


def _keeps_values_in_python(metric: keras.Metric) -> bool:
    own = [value for name, value in vars(metric).items() if not name.startswith("_")]
    return any(isinstance(value, list | dict | set) for value in own)


@contextlib.contextmanager
def _attributes_kept(metric: keras.Metric) -> Iterator[None]:
    """Within it, what a metric counts in Python does not count."""
    before = dict(vars(metric))
    try:
        yield
    finally:
        vars(metric).clear()
        vars(metric).update(before)
