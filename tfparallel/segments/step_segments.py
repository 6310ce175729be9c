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
from tfparallel.segments.segment import Segment, made_between, rewire


class Weights(Protocol):
    """What a segment computes with, where that is not there all the time."""

    def gather(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The weights, put together once `after` are there."""

    def given(self, weights: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager:
        """Within it the layer reads these; gradient tapes hear of it."""

    def gather_again(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `gather`, for the backward pass; nothing where the first ones are kept for it."""


# A layer; what gives the `Weights` of a call, or None for a call without; whether a call of these
# outputs is computed again.
Called = tuple[keras.Layer, Callable | None, Callable[[Any], bool] | None]


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
    def _own(self) -> "list[tuple[Segment, Weights | None]]":
        """Segments of the calling replica's thread and their weights, in the order of calls."""
        if not hasattr(self._thread, "own"):
            self._thread.own = []
        return self._thread.own

    @contextlib.contextmanager
    def called(self, layers: Iterable[Called]) -> Iterator[None]:
        """Within it, calls of `layers` are segments."""
        if tf.executing_eagerly():
            yield
            return
        with contextlib.ExitStack() as hooks:
            for layer, weights_of, recomputes in layers:
                hooks.enter_context(self._shadowed(layer, weights_of, recomputes))
            yield
        rewire(self._graph, self._segments)

    def _shadowed(
        self, layer: keras.Layer, weights_of: Callable | None, recomputes: Callable | None
    ) -> Any:
        def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
            return self._call(weights_of, recomputes, original, args, kwargs)

        return shadowed(
            layer,
            "call",
            wrapped(layer, "call", call),
            during="the tracing of a step",
            why="A segment's weights are gathered before it is called, and freed after; its "
            "activations are kept, or computed again.",
        )

    def _call(
        self,
        weights_of: Callable | None,
        recomputes: Callable | None,
        original: Callable,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        inputs = [x for x in keras.tree.flatten((args, kwargs)) if isinstance(x, tf.Tensor)]
        is_segment = tf.compat.v1.get_default_graph() is self._graph and bool(inputs)
        weights = weights_of() if is_segment and weights_of is not None else None
        is_outermost = is_segment and recomputes is not None and not self._is_inside
        if weights is None and not is_outermost:
            return original(*args, **kwargs)
        segment, own = Segment(inputs), self._own
        own.append((segment, weights))
        self._segments.append(segment)
        number = len(own) - 1
        if weights is not None:
            with record.stop_recording():
                segment.weights = weights.gather(own[max(0, number - self._prefetch)][0].inputs)
        begin = len(self._graph.get_operations())
        with (
            contextlib.nullcontext() if weights is None else weights.given(segment.weights),
            self._inside() if is_outermost else contextlib.nullcontext(),
        ):
            outputs = original(*args, **kwargs)
        if is_outermost and recomputes is not None and recomputes(outputs):
            flat = [y for y in keras.tree.flatten(outputs) if isinstance(y, tf.Tensor)]
            segment.recomputes = made_between(self._graph, begin, flat).__contains__
        return self._told(outputs, number)

    @property
    def _is_inside(self) -> bool:
        """Whether the calling thread is in a segment that may be computed again as a whole."""
        return getattr(self._thread, "is_inside", False)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._thread.is_inside = True
        try:
            yield
        finally:
            self._thread.is_inside = False

    def _told(self, outputs: Any, number: int) -> Any:
        """`outputs`, whose gradients tell that the backward pass of a segment begins."""

        def told(value: Any) -> Any:
            if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
                return value
            with record.stop_recording():
                copy = tf.identity(value)
            own = self._own
            own[number][0].is_differentiated |= record.should_record_backprop([value])

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
        own[number][0].gate = own[number][0].gate or gate
        for segment, weights in own[max(0, number - self._prefetch) : number + 1][::-1]:
            if segment.is_differentiated and segment.backward_from is None:
                segment.backward_from = len(self._graph.get_operations())
                if weights is None:
                    continue
                with record.stop_recording():
                    again = weights.gather_again(gate)
                replaced = zip(segment.weights, again, strict=bool(again))
                segment.replaced = {id(before): after for before, after in replaced}
