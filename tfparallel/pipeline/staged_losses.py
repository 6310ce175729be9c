"""Losses and metrics traced once, and called for every microbatch as a part of the last stage.

Operation by operation they would be most of what a microbatch adds to the step's graph.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import (
    compile_loss_of,
    compiled_metrics_of,
    flat_losses,
    loss_tracker_of,
)


@contextlib.contextmanager
def staged_losses(model: keras.Model, call: Callable) -> Iterator[None]:
    """Within it, `model`'s losses, and the metrics that Keras updates itself, go through `call`.

    Args:
        model: compiled, or not.
        call: takes a name, a function and its positional arguments, on the last stage.
    """
    graph = tf.compat.v1.get_default_graph()

    def in_step(name: object, function: Callable, *arguments: object) -> tf.Tensor | None:
        # Within a branch, or a layer, operations belong to another graph.
        if tf.compat.v1.get_default_graph() is not graph:
            return function(*arguments)
        return call(name, function, arguments)

    tracker, metrics = loss_tracker_of(model), compiled_metrics_of(model)
    losses = flat_losses(model)
    with contextlib.ExitStack() as hooks:
        for metric in [each for each in (tracker, metrics) if each is not None]:
            update = functools.partial(_update, in_step, id(metric))
            hooks.enter_context(
                shadowed(
                    metric,
                    "update_state",
                    wrapped(metric, "update_state", update),
                    during="the tracing of a pipeline's step",
                    why="What metrics compute is traced once for all microbatches.",
                )
            )
        if losses:
            hooks.enter_context(
                shadowed(
                    compile_loss_of(model),
                    "_flat_losses",
                    _through(in_step, losses),
                    during="the tracing of a pipeline's step",
                    why="What losses compute is traced once for all microbatches.",
                )
            )
        yield


def _through(in_step: Callable, losses: Sequence) -> list:
    staged = []
    for i, entry in enumerate(losses):
        # Keeps what others ask a loss for, its reduction above all.
        staged.append(entry._replace(loss=_StagedLoss(entry.loss, in_step, ("loss", i))))
    return staged


class _StagedLoss:
    """A loss that is called through a step; all else is asked of the loss itself.

    Attributes:
        unstaged: the loss itself.
    """

    def __init__(self, loss: Callable, in_step: Callable, name: object):
        self.unstaged, self._in_step, self._name = loss, in_step, name

    def __call__(
        self, y_true: object, y_pred: object, sample_weight: tf.Tensor | None = None
    ) -> object:
        return self._in_step(self._name, self.unstaged, y_true, y_pred, sample_weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unstaged, name)


def _update(
    in_step: Callable, key: int, original: Callable, *args: object, **kwargs: object
) -> None:
    """`Metric.update_state`, of which no gradient is taken."""
    names = list(kwargs)

    def update(*arguments: object) -> None:
        positional = arguments[: len(args)]
        original(*positional, **dict(zip(names, arguments[len(args) :], strict=True)))

    with record.stop_recording():
        in_step(("metric", key, len(args), *names), update, *args, *kwargs.values())
