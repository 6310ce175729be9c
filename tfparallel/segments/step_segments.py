"""Layers of a model as segments of a step, while the step is traced.

Each layer that is a segment is called as ever, with its instance's `call` shadowed for that time.
Before, its weights may be put together; when the gradient of its outputs is there, again.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfparallel.internals import get_keras_mask, record, set_keras_mask
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.segments.segment import Segment, rewire


class Weights(Protocol):
    """What a segment computes with, where that is not there all the time."""

    def gather(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The weights, put together once `after` are there."""

    def given(self, weights: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager:
        """Within it the layer reads these; gradient tapes hear of it."""

    def gather_again(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `gather`, for the backward pass; nothing where the first ones are kept for it."""


class StepSegments:
    """Those of one step.

    Args:
        prefetch: how many segments ahead weights are put together.
    """

    def __init__(self, prefetch: int = 0):
        self._prefetch = prefetch
        self._graph = tf.compat.v1.get_default_graph()
        self._thread = threading.local()
        self._segments: list[Segment] = []

    @property
    def _own(self) -> "list[tuple[Segment, Weights]]":
        """Segments of the calling replica's thread and their weights, in the order of calls."""
        if not hasattr(self._thread, "own"):
            self._thread.own = []
        return self._thread.own

    @contextlib.contextmanager
    def called(self, layers: Iterable[tuple[keras.Layer, Callable]]) -> Iterator[None]:
        """Within it, calls of `layers` are segments.

        Args:
            layers: each with a function that gives the `Weights` of a call, or None for a call that
                is no segment.
        """
        if tf.executing_eagerly():
            yield
            return
        with contextlib.ExitStack() as hooks:
            for layer, weights_of in layers:
                hooks.enter_context(self._shadowed(layer, weights_of))
            yield
        rewire(self._graph, self._segments)

    def _shadowed(self, layer: keras.Layer, weights_of: Callable) -> Any:
        def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
            return self._call(weights_of, original, args, kwargs)

        return shadowed(
            layer,
            "call",
            wrapped(layer, "call", call),
            during="the tracing of a step",
            why="A segment's weights are gathered before it is called, and freed after.",
        )

    def _call(self, weights_of: Callable, original: Callable, args: tuple, kwargs: dict) -> Any:
        inputs = [x for x in keras.tree.flatten((args, kwargs)) if isinstance(x, tf.Tensor)]
        is_in_step = tf.compat.v1.get_default_graph() is self._graph
        weights = weights_of() if is_in_step and inputs else None
        if weights is None:
            return original(*args, **kwargs)
        segment, own = Segment(inputs), self._own
        own.append((segment, weights))
        self._segments.append(segment)
        ahead = own[max(0, len(own) - 1 - self._prefetch)][0]
        with record.stop_recording():
            segment.weights = weights.gather(ahead.inputs)
        with weights.given(segment.weights):
            outputs = original(*args, **kwargs)
        return self._told(outputs, len(own) - 1)

    def _told(self, outputs: Any, number: int) -> Any:
        """`outputs`, whose gradients tell that the backward pass of a segment begins."""

        def told(value: Any) -> Any:
            if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
                return value
            with record.stop_recording():
                copy = tf.identity(value)
            own = self._own

            def backward(gradient: Any) -> list:
                self._begin_backward(own, number, gradient)
                return [gradient]

            record.record_operation("Segment", [copy], [value], backward)
            mask = get_keras_mask(value)
            if mask is not None:
                set_keras_mask(copy, mask)
            return copy

        return keras.tree.map_structure(told, outputs)

    def _begin_backward(self, own: list, number: int, gradient: Any) -> None:
        """Has the segment's weights, and those of the segments before it, on their way."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return
        gate = tf.nest.flatten(gradient, expand_composites=True)
        for segment, weights in own[max(0, number - self._prefetch) : number + 1][::-1]:
            if segment.backward_from is None:
                segment.backward_from = len(self._graph.get_operations())
                segment.gate = gate
                with record.stop_recording():
                    again = weights.gather_again(gate)
                replaced = zip(segment.weights, again, strict=bool(again))
                segment.replaced = {id(before): after for before, after in replaced}
