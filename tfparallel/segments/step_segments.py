"""Layers of a model as segments of a step, while the step is traced.

Each layer that is a segment is called as ever, with its instance's `call` shadowed for that time.
Before, its weights may be put together; when the gradient of its outputs is there, again.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.graphs import is_stateful
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.probabilities import origin_of, with_origin
from tfparallel.segments.segment import Segment, computed_between, rewire
from tfparallel.segments.tensor_notes import carry_notes


class Weights(Protocol):
    """What a segment computes with, where that is not there all the time."""

    def gather(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The weights, put together once `after` are there."""

    def given(self, weights: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager:
        """Within it the layer reads these; gradient tapes hear of it."""

    def gather_again(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `gather`, for the backward pass; nothing where the first ones are kept for it."""


class Called(NamedTuple):
    """A layer whose calls are segments.

    Attributes:
        layer: of the model.
        weights_of: gives the `Weights` of a call, or None for a call without.
        recomputes: whether a call of these outputs is computed again.
        offloads: whether what a call keeps is on the host until its backward pass.
    """

    layer: keras.Layer
    weights_of: Callable | None = None
    recomputes: Callable[[Any], bool] | None = None
    offloads: bool = False


class StepSegments:
    """Those of one step.

    Args:
        prefetch: how many segments ahead weights are put together.
        own_devices: those that compute the calling replica, where they are several; by default
            what computes a call's outputs.
        in_xla: whether XLA compiles the step.
    """

    def __init__(
        self,
        prefetch: int = 0,
        own_devices: Callable[[], Sequence[str]] | None = None,
        in_xla: bool = False,
    ):
        self._prefetch, self._in_xla = prefetch, in_xla
        self._own_devices = own_devices or tuple
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
            for each in layers:
                hooks.enter_context(self._shadowed(each))
            yield
        rewire(self._graph, self._segments, self._in_xla)

    def finish_own(self) -> None:
        """Ends those of the calling replica's thread, where its step ends before the others'.

        What is traced outside of one program for all replicas is not in it.
        """
        own = [segment for segment, _ in self._own]
        rewire(self._graph, own, self._in_xla)
        self._segments = [each for each in self._segments if each not in own]
        self._thread.own = []

    def _shadowed(self, called: Called) -> contextlib.AbstractContextManager:
        def call(original: Callable, *args: object, **kwargs: object) -> object:
            return self._call(called, original, args, kwargs)

        layer = called.layer
        return shadowed(
            layer,
            "call",
            wrapped(layer, "call", call),
            during="the tracing of a step",
            why="A segment's weights are gathered before it is called, and freed after; its "
            "activations are kept, on the host if it is said, or computed again.",
        )

    def _call(self, called: Called, original: Callable, args: tuple, kwargs: dict) -> object:
        inputs = [x for x in keras.tree.flatten((args, kwargs)) if isinstance(x, tf.Tensor)]
        is_traced = not tf.executing_eagerly()  # it may be tried meanwhile, on random rows
        in_graph = is_traced and tf.compat.v1.get_default_graph() is self._graph
        is_segment = in_graph and bool(inputs)
        weights = called.weights_of() if is_segment and called.weights_of is not None else None
        inside = self._inside
        recomputes = called.recomputes if is_segment and not inside.recomputes else None
        offloads = is_segment and called.offloads and not inside.offloads
        if weights is None and recomputes is None and not offloads:
            return original(*args, **kwargs)
        segment, own = Segment(inputs), self._own
        segment.offloads = offloads or inside.offloads
        own.append((segment, weights))
        self._segments.append(segment)
        number = len(own) - 1
        if weights is not None:
            with record.stop_recording():
                segment.weights = weights.gather(own[max(0, number - self._prefetch)][0].inputs)
        segment.forward_from = begin = len(self._graph.get_operations())
        within = _Inside(inside.recomputes or recomputes is not None, segment.offloads)
        with (
            contextlib.nullcontext() if weights is None else weights.given(segment.weights),
            self._while(within),
        ):
            outputs = original(*args, **kwargs)
        flat = [y for y in keras.tree.flatten(outputs) if isinstance(y, tf.Tensor)]
        origins = [origin for y in flat if (origin := origin_of(y)) is not None]
        flat += [x for x, _ in origins if not any(x is each for each in inputs)]
        if recomputes is not None and recomputes(outputs):
            segment.recomputes = computed_between(
                self._graph, begin, flat, is_stateful, self._own_devices()
            ).__contains__
        if offloads:
            made = computed_between(
                self._graph, begin, flat, lambda operation: False, self._own_devices()
            )
            segment.computed = made | {y.op for y in flat}
        return self._told(outputs, number)

    @property
    def _inside(self) -> "_Inside":
        """What holds for all layers in the segments that the calling thread is in."""
        return getattr(self._thread, "inside", _Inside(False, False))

    @contextlib.contextmanager
    def _while(self, inside: "_Inside") -> Iterator[None]:
        before = self._inside
        self._thread.inside = inside
        try:
            yield
        finally:
            self._thread.inside = before

    def _told(self, outputs: object, number: int) -> tf.Tensor:
        """`outputs`, whose gradients tell that the backward pass of a segment begins.

        What came in and goes out as it is stays one tensor: a layer that takes its mask does so in
        both places.
        """
        own_inputs = self._own[number][0].inputs

        def told(value: object) -> tf.Tensor:
            if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
                return value
            if any(value is each for each in own_inputs):
                return value
            origin = origin_of(value)
            logits = None if origin is None else told(origin.logits)
            with record.stop_recording():
                copy = tf.identity(value)
            own = self._own
            own[number][0].is_differentiated |= record.should_record_backprop([value])

            def backward(gradient: tf.Tensor) -> list:
                self._begin_backward(own, number, gradient)
                return [gradient]

            record.record_operation("Segment", [copy], [value], backward)
            copy = with_origin(copy, origin, logits)
            carry_notes(value, copy)
            return copy

        return keras.tree.map_structure(told, outputs)

    def _begin_backward(self, own: list, number: int, gradient: tf.Tensor) -> None:
        """Has the segment's weights, and those of the segments before it, on their way."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return
        gate = tf.nest.flatten(gradient, expand_composites=True)
        self._begin_own(own[number][0], gate)
        for segment, weights in own[max(0, number - self._prefetch) : number + 1][::-1]:
            if segment.is_differentiated and segment.backward_from is None:
                segment.backward_from = len(self._graph.get_operations())
                if weights is None:
                    continue
                with record.stop_recording():
                    again = weights.gather_again(gate)
                replaced = zip(segment.weights, again, strict=bool(again))
                segment.replaced = {id(before): after for before, after in replaced}

    def _begin_own(self, segment: Segment, gate: list) -> None:
        """Notes the gradient that a segment's backward pass begins with.

        What it takes from the host is on its way when that of the one behind it begins.
        """
        if segment.gate:
            return
        segment.gate, segment.own_backward_from = gate, len(self._graph.get_operations())
        if segment.offloads:
            segment.fetch_gate = getattr(self._thread, "last_gate", gate)
            self._thread.last_gate = gate


class _Inside(NamedTuple):
    """What holds in a segment for the layers in it.

    Attributes:
        recomputes: whether it may be computed again as a whole.
        offloads: whether what it keeps is on the host.
    """

    recomputes: bool
    offloads: bool
