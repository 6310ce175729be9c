"""Losses that layers add (`self.add_loss`), such that they count as those of one device.

What a layer adds of a replica's rows is a mean over rows, a sum, or the same for any rows, which is
tried on random inputs as a compiled loss is (`loss_kinds.py`). Penalties of weights and of
activities are Keras's own, and are the same or means.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import in_stateless_scope
from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import kept_losses, layers_of, own_losses, stock_own_losses
from tfparallel.replicas.loss_kinds import declared_kind
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.row_trial import (
    GathersRowsError,
    TakesTensorsError,
    TrialOutcome,
    UntriableError,
    found_for,
    trial,
)

_known: Any = weakref.WeakKeyDictionary()  # kinds of the losses of a layer, by their number


@contextlib.contextmanager
def weighted(model: keras.Model) -> Iterator[None]:
    """Within it, sums over rows that `model`'s layers add are weighted like means."""
    with contextlib.ExitStack() as hooks:
        for layer in layers_of(model):
            if type(layer).__module__.startswith("keras.src."):
                continue  # adds no loss but by its regularizers
            calls = CallsOfLayer(layer)
            hooks.enter_context(
                shadowed(
                    layer,
                    "call",
                    calls.call,
                    during="a step on replicas",
                    why="Notes what a layer was called with, to try what it adds to the loss.",
                )
            )
            hooks.enter_context(
                shadowed(
                    layer,
                    "_get_own_losses",
                    calls.own_losses,
                    during="a step on replicas",
                    why="Sums over rows that a layer adds to the loss are weighted like means.",
                )
            )
        yield


class CallsOfLayer:
    """What a layer was called with last, and what its losses are to those of all rows."""

    def __init__(self, layer: keras.Layer):
        self._layer, self._call, self._own_losses = layer, layer.call, own_losses(layer)
        self._arguments: tuple = ()
        self._is_of_all_rows = False

    def call(self, *args: object, **kwargs: object) -> object:
        """`layer.call`."""
        if in_stateless_scope():  # a trial
            return self._call(*args, **kwargs)
        self._arguments, step = (args, kwargs), current_replica_step()
        self._is_of_all_rows = step is not None and step.has_all_rows
        return self._call(*args, **kwargs)

    def own_losses(self) -> list:
        """`layer._get_own_losses`, scaled for a step that weighs each replica by its rows."""
        losses, step = self._own_losses(), current_replica_step()
        if not losses or step is None or self._is_of_all_rows or in_stateless_scope():
            return losses
        return [
            tf.math.divide_no_nan(loss, tf.cast(step.weight, loss.dtype)) if kind == "sum" else loss
            for loss, kind in zip(losses, self._kinds(len(losses)), strict=True)
        ]

    def _kinds(self, count: int) -> Sequence[str]:
        declared = declared_kind(self._layer)
        if declared is not None:
            return [declared] * count
        known = _known.setdefault(self._layer, {})
        if count not in known:
            known[count] = [self._kind(i, count) for i in range(count)]
        return known[count]

    def _kind(self, index: int, count: int) -> str:
        """The kind of the loss number `index` out of `count`.

        Raises:
            ValueError: if it couples rows.
        """
        args, kwargs = self._arguments
        options = [kwargs]
        if kwargs.get("training"):  # without Dropout and batch statistics, if that makes it clear
            options = [{**kwargs, "training": False}, kwargs]
        error: BaseException | None = None
        for each in options:
            try:
                kind = _tried(self._layer, args, each, index, count)
            except GathersRowsError:
                return "mean"
            except (TakesTensorsError, UntriableError) as raised:
                error = raised.__cause__
                continue
            if kind is not None:
                return kind
        tf.get_logger().warning(
            "What layer '%s' adds to the loss is taken for a mean over rows: it cannot be tried "
            "on random inputs (%r). Declare it: tfparallel.mean_loss(layer) or "
            "tfparallel.sum_loss(layer).",
            self._layer.name,
            error or "it is random",
        )
        return "mean"


def _tried(layer: keras.Layer, args: tuple, kwargs: dict, index: int, count: int) -> str | None:
    """The kind of a layer's loss; None if it is random."""
    flat = keras.tree.flatten((args, kwargs))
    at = [i for i, leaf in enumerate(flat) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
    specs = [tf.TensorSpec([None, *flat[i].shape[1:]], flat[i].dtype) for i in at]
    is_random = []

    def loss_of(rows: Sequence) -> tf.Tensor:
        filled = list(flat)
        for i, own in zip(at, rows, strict=True):
            filled[i] = own
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
        losses = _losses_of(layer, lambda: layer(*own_args, **own_kwargs))
        if not losses or count % len(losses):
            raise ValueError(f"{len(losses)} losses instead of {count}")
        return tf.reduce_sum(losses[index % len(losses)])  # a shared layer adds some in each call

    def outcome(_: object, rows: Sequence, __: object) -> TrialOutcome:
        loss = loss_of(rows)
        is_random.append(bool(loss != loss_of(rows)))
        return TrialOutcome(loss, loss)

    with trial():
        kinds = found_for(outcome, None, specs, None, layer.compute_dtype).kinds
    kind = next((kind for kind in ("mean", "sum") if kind in kinds), None)
    if kind is None and not any(is_random):
        raise ValueError(
            "What a layer adds to the loss must be a mean over rows, a sum over rows, or the same "
            f"for any rows, to be computed in parts. Received: layer '{layer.name}', whose loss "
            "couples rows. Gather them in the layer with strategy.all_rows, or declare what is to "
            "be made of the parts: tfparallel.mean_loss(layer) or tfparallel.sum_loss(layer)."
        )
    return kind


def _losses_of(layer: keras.Layer, call: Callable) -> list:
    """The losses that `layer` itself adds in `call`, which is to leave no trace at it."""
    with kept_losses(layer):
        call()
        return stock_own_losses(layer)
