"""What a step of a user's own returns: means over rows, and numbers that are said to be none.

`fit` reports the mean of what the replicas return, weighted by rows, and metrics take numbers in
the same way. That is the number of one device for a mean over rows. Of a norm of gradients, a
largest value or a sum it is another one, which changes no training: so it is said, and not refused.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfparallel.internals import Mean, Sum
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import behind
from tfparallel.replicas.dependence import reaches
from tfparallel.replicas.local_copies import assigned_here
from tfparallel.replicas.own_step import StepOfOwnRows, few_digits_of
from tfparallel.replicas.row_trial import UntriableError

_DRAWS = 2  # each computes the model three times


@contextlib.contextmanager
def numbers_of_metrics_noted(model: keras.Model, noted: dict[str, tf.Tensor]) -> Iterator[None]:
    """Within it, `noted` gets the numbers that means and sums of `model` get, by their names."""

    def note(metric: keras.Metric, update: Callable, values: object, **weights: object) -> object:
        number: tf.Tensor = tf.convert_to_tensor(values)
        if number.shape.rank == 0:
            noted[metric.name] = number
        return update(values, **weights)

    with contextlib.ExitStack() as hooks:
        for metric in model.metrics:
            if counts_a_batch_once(metric):
                hooks.enter_context(
                    shadowed(
                        metric,
                        "update_state",
                        wrapped(metric, "update_state", functools.partial(note, metric)),
                        during="the trace of a step for any rows",
                        why="Numbers that are no means over rows are said to be none.",
                    )
                )
        yield


def tell_of_outputs(model: keras.Model, step: StepOfOwnRows | None) -> None:
    """Warns of numbers that a step returns, and that are other ones than on one device.

    Args:
        model: whose `train_step` has been traced.
        step: as `step_losses.check_losses`, which has found nothing, takes it.
    """
    if step is None or step.is_coupled_by_layers():
        return
    numbers = _own_numbers(model, step)
    floats = {name: number for name, number in numbers.items() if number.dtype.is_floating}
    names = _no_means(step, floats, few_digits_of(model))
    names = [name for name in numbers if name in names or name not in floats]
    if names:
        tf.get_logger().warning(
            "The train_step of model '%s' returns, or gives to a metric, what is no mean over "
            "rows: %s. The mean of what replicas have for their own rows is reported, and weights "
            "are not concerned. To report that of all rows, compute it of "
            "strategy.all_rows(y_pred), or of gradients that "
            "tf.distribute.get_replica_context().all_reduce has summed.",
            model.name,
            ", ".join(f"'{name}'" for name in names),
        )


def counts_a_batch_once(metric: keras.Metric) -> bool:
    """Whether a number that `metric` gets is taken for one of a batch: a mean over its rows."""
    return type(metric).update_state in (Mean.update_state, Sum.update_state)


def _own_numbers(model: keras.Model, step: StepOfOwnRows) -> dict[str, tf.Tensor]:
    """Those that `fit` averages, but for losses, which are tried, and results of metrics."""
    of_metrics = {
        id(copy.handle)
        for variable in model.metrics_variables
        for copy in assigned_here(behind(variable))
    }
    handles = {id(inner) for outer, inner in step.graph.captures if id(outer) in of_metrics}
    known = handles | set(map(id, step.losses))
    return {
        "/".join(map(str, path)): value
        for path, value in [
            *keras.tree.flatten_with_path(step.outputs),
            *(((name,), value) for name, value in step.given_to_metrics.items()),
        ]
        if step.has(value)
        and value.dtype != tf.bool
        and value.shape.rank == 0
        and step.is_of_own_rows(value)
        and not reaches(value, handles)
        and id(value) not in known
    }


def _no_means(
    step: StepOfOwnRows, numbers: dict[str, tf.Tensor], computed_in: str | None
) -> list[str]:
    """The names of `numbers` that parts do not make: tried together, and alone if they are not."""
    if not numbers:
        return []
    with step.graph.as_default():
        together = tf.stack([tf.cast(number, tf.float64) for number in numbers.values()])
    try:
        if "mean" in step.kinds_of(together, computed_in, _DRAWS):
            return []
    except UntriableError:
        return []
    if len(numbers) == 1:
        return list(numbers)
    return [
        name for name, number in numbers.items() if _no_means(step, {name: number}, computed_in)
    ]
