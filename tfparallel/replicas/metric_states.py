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
    get_keras_mask,
    in_stateless_scope,
    in_symbolic_scope,
    set_keras_mask,
    values_util,
)
from tfparallel.replicas.batch import Rows
from tfparallel.replicas.coupled_losses import rows_of_all
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step
from tfparallel.replicas.row_trial import (
    GathersRowsError,
    TakesTensorsError,
    UntriableError,
    adds_up,
    trial,
)

_ROLES = "y_true", "y_pred", "sample_weight"
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
        arguments = UpdateArguments(args, kwargs, step.rows)
        if is_adding(metric, arguments):
            return update_state(*args, **kwargs)
        args, kwargs = _of_whole_batch(metric, arguments, step)
        if tf.executing_eagerly() and not _own_variables(metric) and _number_in_process() > 0:
            return None  # what it keeps in Python is one for all replicas
        with step.with_all_rows():
            return update_state(*args, **kwargs)

    return on_replica


class UpdateArguments:
    """What a metric is updated with on a replica.

    Args:
        args, kwargs: of `update_state`.
        count: how many rows the replica has; None: what has an axis has rows.

    Attributes:
        leaves: tensors and others.
        rows: the places of dense tensors with as many rows, or a multiple (positions of rows).
        numbers: the places of other dense tensors, which say something of the whole.
        key: equal for arguments that are alike but for the values of tensors.
    """

    def __init__(self, args: tuple, kwargs: dict, count: Rows | None):
        self._nest = args, kwargs
        self.leaves = keras.tree.flatten(self._nest)
        dense = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, tf.Tensor)]
        self.rows = [i for i in dense if _has_rows(self.leaves[i], count)]
        self.numbers = [i for i in dense if i not in self.rows]
        self.masked = [i for i in self.rows if get_keras_mask(self.leaves[i]) is not None]
        self.key = tuple(
            (str(self._spec(i)), i in self.masked) if i in dense else repr(leaf)
            for i, leaf in enumerate(self.leaves)
        )

    def _spec(self, i: int) -> tf.TensorSpec:
        """Of what is drawn: the parts that numbers are of are added up."""
        leaf = self.leaves[i]
        return tf.TensorSpec([None, *leaf.shape[1 if i in self.rows else 0 :]], leaf.dtype)

    def specs(self) -> tuple[list, list, list]:
        """Of targets, of predictions and their masks, and of weights, as `adds_up` takes them."""
        targets, predictions, weights = self._by_role()
        specs = [[self._spec(i) for i in places] for places in (targets, predictions, weights)]
        return specs[0], specs[1] + [self._spec_of_mask(i) for i in self.masked], specs[2]

    def _spec_of_mask(self, i: int) -> tf.TensorSpec:
        mask = get_keras_mask(self.leaves[i])
        return tf.TensorSpec([None, *mask.shape[1:]], mask.dtype)

    def drawn(self, targets: Sequence, predictions: Sequence, weights: Sequence) -> tuple:
        """Arguments of what is drawn for `specs()`."""
        roles, leaves = self._by_role(), list(self.leaves)
        masks = predictions[len(roles[1]) :]
        for places, values in zip(roles, (targets, predictions, weights), strict=True):
            for i, value in zip(places, values, strict=False):
                leaves[i] = value if i in self.rows else tf.reduce_sum(value, 0)
        for i, mask in zip(self.masked, masks, strict=True):
            set_keras_mask(leaves[i], mask)
        return self.packed(leaves)

    def packed(self, leaves: Sequence) -> tuple[tuple, dict]:
        """Arguments with other leaves."""
        args, kwargs = keras.tree.pack_sequence_as(self._nest, leaves)
        return args, kwargs

    def _by_role(self) -> tuple[list, list, list]:
        """The places of targets, predictions and weights, as Keras passes them."""
        args, kwargs = self._nest
        is_alone = len(args) == 1  # as `Mean` takes values
        of_args = ["y_pred"] if is_alone else [*_ROLES, *["y_pred"] * len(args)][: len(args)]
        names = [*of_args, *kwargs]
        roles: dict[str, list] = {"y_true": [], "sample_weight": [], "y_pred": []}
        place = 0
        for name, argument in zip(names, [*args, *kwargs.values()], strict=True):
            count = len(keras.tree.flatten(argument))
            own = [i for i in range(place, place + count) if i in self.rows + self.numbers]
            roles[name if name in roles else "y_pred"] += own
            place += count
        return roles["y_true"], roles["y_pred"], roles["sample_weight"]


def _has_rows(tensor: tf.Tensor, count: Rows | None) -> bool:
    if not tensor.shape.rank or count is None:
        return bool(tensor.shape.rank)
    first = tensor.shape[0]
    if first is None or not isinstance(count, int):
        return first is None
    return first == count or (count > 1 and first % count == 0)


def _of_whole_batch(metric: keras.Metric, arguments: UpdateArguments, step: ReplicaStep) -> tuple:
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


def is_adding(metric: keras.Metric, arguments: UpdateArguments) -> bool:
    """Whether an update with such arguments adds a sum over rows to the state of `metric`."""
    known = _adding.setdefault(metric, {})
    if arguments.key not in known:
        known[arguments.key] = _tried(metric, arguments)
    return known[arguments.key]


def _tried(metric: keras.Metric, arguments: UpdateArguments) -> bool:
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
            return adds_up(update, *arguments.specs(), computed_in=_least_digits(arguments))
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


def _least_digits(arguments: UpdateArguments) -> str | None:
    few = "float16", "bfloat16"
    dtypes = [arguments.leaves[i].dtype.name for i in arguments.rows + arguments.numbers]
    return max((each for each in dtypes if each in few), default=None)


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
