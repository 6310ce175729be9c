"""One train, test or predict step of a Keras model, cut over the replicas and put together again.

Keras's step function is written for one device. Run on a replica with `n_i` of the batch's `N` rows
it computes the mean loss `L_i` over its own rows. What one device computes is
`L = sum_i w_i L_i` with `w_i = n_i / N`, so inside a step:

- Keras sees one replica (`num_replicas_in_sync == 1`): its losses are plain means, not means / R;
- gradients are weighted by `w_i` and summed, before anything is clipped (`optimizer_hooks.py`);
- losses that are not means over rows are rescaled so that the same formula holds, metrics that
  average scalars count a batch once, and every metric's result is global (`model_hooks.py`).

`w_i` is right for any batch: uneven ones, and batches with fewer rows than replicas.
"""

import collections
import types
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import is_stock_step, is_train_step, values_util
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.internals.shared_constants import constants_shared
from tfparallel.replicas import model_hooks
from tfparallel.replicas.batch import Batch, concat_rows
from tfparallel.replicas.interface import StepDecisions, StepStrategy
from tfparallel.replicas.joined_values import split_up
from tfparallel.replicas.replica_step import ReplicaStep
from tfparallel.replicas.step_build import targets_by_row
from tfparallel.replicas.variables import joined_copies
from tfparallel.replicas.weighed_gradients import active_step


def run_keras_step(strategy: StepStrategy, step_function: types.MethodType, data: object) -> object:
    """Runs a model's `train_step` or `test_step` on every replica; returns what one device would.

    Args:
        strategy: a `KerasStrategy`.
        step_function: the bound method of the model.
        data: the batch, as `Batch` takes it.
    """
    model, extended = step_function.__self__, strategy.extended
    batch = Batch(extended, data)
    weights_loss = is_train_step(step_function) and is_stock_step(step_function)
    statistics: list = []
    global_results: list = []

    def replica_function() -> object:
        i = _local_replica_id()
        part = batch.parts[i]
        step = ReplicaStep(
            batch.rows[i], batch.weights[i], weights_loss, statistics, part, batch.first_rows[i]
        )
        if is_train_step(step_function):
            step.by_row = targets_by_row(model)
        with active_step(step), extended._behind(part):
            return keras.tree.map_structure(_read, step_function(part))

    graph = tf.compat.v1.get_default_graph()
    with model_hooks.hooked(model, extended, global_results), constants_shared(graph):
        outputs = strategy._run_on_replicas(replica_function)
    _average_statistics(extended, statistics, batch)
    return keras.tree.map_structure(
        lambda value: _reduce_output(strategy, value, batch, global_results), outputs
    )


def run_predict_step(
    strategy: StepStrategy, predict_step: Callable, data: object, model: keras.Model
) -> object:
    """Runs `predict_step` of `model` on every replica's rows; returns all rows in their order."""
    extended = strategy.extended
    batch = Batch(extended, data)
    statistics: list = []

    def replica_function() -> object:
        i = _local_replica_id()
        part = batch.parts[i]
        step = ReplicaStep(
            batch.rows[i], batch.weights[i], False, statistics, part, batch.first_rows[i]
        )
        with active_step(step):
            return predict_step(part)

    with model_hooks.gathering_layers(model, extended):
        outputs = strategy._run_on_replicas(replica_function)
    _average_statistics(extended, statistics, batch)
    return keras.tree.map_structure(
        lambda rows: extended._gather_rows(concat_rows(strategy.experimental_local_results(rows))),
        outputs,
    )


def _average_statistics(extended: StepDecisions, variables: list, batch: Batch) -> None:
    """Statistics of each replica's own rows (BatchNorm) become their mean, weighted by rows."""
    variables = list({id(variable): variable for variable in variables}.values())
    if not variables:
        return
    groups: dict[tf.DType, list] = collections.defaultdict(list)
    for variable in variables:
        groups[variable.dtype].append(variable)
    shares = [_mean(own, batch) for own in groups.values()]
    own_values = [joined_copies(own, 0) for own in groups.values()]
    means = extended._mean_statistics(own_values, shares, batch)
    for own, mean in zip(groups.values(), means, strict=True):
        _assign_parts(own, mean)


def _mean(variables: Sequence, batch: Batch) -> tf.Tensor:
    """`[values of all variables]`: the mean of the replicas' copies, weighted by rows.

    Variables of one type are one tensor, which crosses from device to device once.
    """
    weighted = []
    for i, (rows, weight) in enumerate(zip(batch.rows, batch.weights, strict=True)):
        with tf.device(variables[0].values[i].device):
            joined = joined_copies(variables, i)
            counted = tf.where(tf.greater(rows, 0), joined, tf.zeros_like(joined))
            weighted.append(counted * tf.cast(weight, joined.dtype))
    with tf.device(variables[0].values[0].device):
        return sum_in_order(weighted)


def _assign_parts(variables: Sequence, joined: tf.Tensor) -> None:
    """Gives every copy of each variable its part of `joined`."""
    for i, first in enumerate(variables[0].values):
        with tf.device(first.device):
            parts = split_up(tf.identity(joined), variables)
            for variable, part in zip(variables, parts, strict=True):
                variable.values[i].assign(part)


def _reduce_output(
    strategy: StepStrategy, value: object, batch: Batch, global_results: list
) -> object:
    """One value of what the step returned: a global result as it is, else the mean over rows."""
    if any(value is result for result in global_results):
        return value
    local = strategy.experimental_local_results(value)
    if not tf.is_tensor(local[0]) or not local[0].dtype.is_floating or local[0].shape.rank != 0:
        return value
    if len(local) == 1:  # one tensor that all replicas have returned
        local = local * len(batch.weights)
    pairs = zip(local, batch.weights, strict=True)
    mean = sum_in_order([x * tf.cast(weight, x.dtype) for x, weight in pairs])
    return strategy.extended._sum_across_workers(mean)


def _read(output: object) -> object:
    """What a replica returns, of a variable (a learning rate) its value."""
    return tf.convert_to_tensor(output) if isinstance(output, keras.Variable) else output


def _local_replica_id() -> int:
    """The current replica's position among those of this process."""
    return values_util.get_current_replica_id_as_int()
