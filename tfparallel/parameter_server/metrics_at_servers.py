"""Metrics whose state is no sum over rows, updated by servers in an asynchronous step.

What workers add to a sum may arrive in any order. Of a maximum, or a moving average, the difference
to what a worker has read is none any more when another has handed in its own in between. So the
worker hands in what such a metric is updated with, and the servers update it, one step's rows after
another's.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfparallel.internals import (
    get_keras_mask,
    in_stateless_scope,
    in_symbolic_scope,
    set_keras_mask,
)
from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import behind, compiled_metrics_of
from tfparallel.parameter_server.effects import current_effects
from tfparallel.replicas.local_copies import first_copy
from tfparallel.replicas.metric_states import has_own_update, is_adding, update_arguments


@contextlib.contextmanager
def updated_at_servers(model: keras.Model) -> Iterator[None]:
    """Within it, metrics of `model` whose state is no sum over rows are updated by the servers."""
    metrics = [*model.metrics, *getattr(compiled_metrics_of(model), "metrics", ())]
    with contextlib.ExitStack() as hooks:
        for metric in filter(has_own_update, metrics):
            hooks.enter_context(
                shadowed(
                    metric,
                    "update_state",
                    functools.partial(_update, metric, metric.update_state),
                    during="an asynchronous step",
                    why="A metric whose state is no sum over rows is updated by the servers.",
                )
            )
        yield


def _update(
    metric: keras.Metric, update_state: Callable, *args: object, **kwargs: object
) -> object:
    effects = current_effects()
    if effects is None or in_stateless_scope() or in_symbolic_scope() or not metric.variables:
        return update_state(*args, **kwargs)
    arguments = update_arguments(args, kwargs, None)
    if is_adding(metric, arguments):
        return update_state(*args, **kwargs)
    places = arguments.rows + arguments.numbers
    tensors = [arguments.leaves[i] for i in places]
    masks = [get_keras_mask(arguments.leaves[i]) for i in arguments.masked]

    def carry_out(values: list[tf.Tensor]) -> None:
        leaves = list(arguments.leaves)
        for i, value in zip(places, values, strict=False):
            leaves[i] = tf.identity(value)
        for i, mask in zip(arguments.masked, values[len(places) :], strict=True):
            set_keras_mask(leaves[i], mask)
        args, kwargs = arguments.packed(leaves)
        update_state(*args, **kwargs)

    device = first_copy(behind(metric.variables[0])).device
    handed_in = [*tensors, *masks]
    what = f"metric '{metric.name}', updated"
    effects.defer(what, handed_in, [device] * len(handed_in), carry_out)
    return None
