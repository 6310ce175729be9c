"""The losses of a model on a replica's rows: their mean over replicas is that of the whole batch.

Compiled ones, those that its layers add, and one of its own `compute_loss`; shadowed on its
instance, as `model_hooks.py` says.
"""

import contextlib
from collections.abc import Iterator

import keras

from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import compile_loss_of, flat_losses
from tfparallel.internals.keras_trainer import has_stock_loss
from tfparallel.replicas import layer_losses
from tfparallel.replicas.computed_losses import computed_loss_of_whole_batch
from tfparallel.replicas.coupled_losses import loss_of_whole_batch


@contextlib.contextmanager
def weighted_losses(model: keras.Model) -> Iterator[None]:
    """Within it, the mean of `model`'s losses weighted by rows is the loss of the whole batch."""
    losses = flat_losses(model)
    with contextlib.ExitStack() as hooks:
        if losses:
            hooks.enter_context(
                shadowed(
                    compile_loss_of(model),
                    "_flat_losses",
                    [entry._replace(loss=loss_of_whole_batch(entry.loss)) for entry in losses],
                    during="a step on replicas",
                    why="Losses that are no means over rows are weighted as if they were.",
                )
            )
        if not has_stock_loss(model):
            hooks.enter_context(
                shadowed(
                    model,
                    "compute_loss",
                    computed_loss_of_whole_batch(model),
                    during="a step on replicas",
                    why="A loss of the model's own that couples rows gets the rows of all.",
                )
            )
        hooks.enter_context(layer_losses.weighted(model))
        yield
