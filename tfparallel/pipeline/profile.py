"""How long each part of a model takes, forward and backward, and how many bytes it makes and sends.

The model is called with one microbatch, outside of the step, as in inference; every part is timed
by itself when it is called (`timed_calls.py`), on a stage's device, so that nothing is kept that no
later part needs. Nothing of the model changes (`no_trace.py`).
"""

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

from tfparallel.internals import Functional
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import functional_graph, outputs_structure
from tfparallel.pipeline.crossing_bytes import CrossingBytes, nbytes
from tfparallel.pipeline.link_speed import seconds_per_byte
from tfparallel.pipeline.memory import num_values, trained_bytes
from tfparallel.pipeline.no_trace import without_trace
from tfparallel.pipeline.parts import Calls, Member, Part, members, variables_by_part
from tfparallel.pipeline.timed_calls import InProportion, TimedCall, TimedCalls
from tfparallel.replicas.all_rows import own_rows_alone
from tfparallel.replicas.code_of_keras import is_method_of_keras
from tfparallel.replicas.convolution_hooks import convolutions_shared

ROWS = 8  # where no batch is known: enough to outweigh the cost of a call


class Cost(NamedTuple):
    """What one part needs for one microbatch.

    Attributes:
        time: of its forward and its backward pass, seconds; for a subclassed model of which no
            batch is known, its number of weights.
        activation_bytes: of its outputs.
        sending_time: seconds for what would cross a cut right behind it, and back.
        copying_time: seconds, once for all microbatches, to bring the gradients of its weights from
            another device, and the weights back.
    """

    time: float
    activation_bytes: int = 0
    sending_time: float = 0.0
    copying_time: float = 0.0


def profile_parts(
    model: keras.Model, parts: Sequence[Part], inputs: object, devices: Sequence[str]
) -> list[Cost]:
    """The cost of each part, of all its calls together.

    Args:
        model: built.
        parts: of the model, in the order in which they run.
        inputs: what the model is called with, a nest of tensors of a microbatch's rows; None where
            that is not known. A functional model, and those in a subclassed one that this does not
            call, are then measured on 8 rows of zeros. If that is not all, weights are counted.
        devices: of each stage. All are taken to be as fast as the first, all links as the slowest.
    """
    with (
        tf.init_scope(),
        without_trace(model),
        own_rows_alone(),
        convolutions_shared(),
        tf.device(devices[0]),
        _shown_progress(len(parts)) as advance,
    ):
        measured = _Measured(parts, TimedCalls(devices[0]), advance)
        if not _is_measured(model, parts, inputs, measured):
            return [Cost(1.0 + sum(map(num_values, _weights(part)))) for part in parts]
        trained = [trained_bytes(own) for own in variables_by_part(parts)]
        return measured.costs(seconds_per_byte(devices), trained)


def slowest(costs: Sequence[Sequence[Sequence]]) -> list[Cost]:
    """What each part costs where it costs most.

    Args:
        costs: by worker and part, each a `Cost` or its list of numbers.
    """
    return [Cost(*map(max, zip(*own, strict=True))) for own in zip(*costs, strict=True)]


def zeros_like_spec(spec: keras.KerasTensor | tf.Tensor, rows: int) -> tf.Tensor:
    """Zeros of a symbolic tensor's shape and type, in `rows` rows; 1 where a size is unknown."""
    shape = [rows, *(1 if size is None else size for size in spec.shape[1:])]
    return tf.zeros(shape, spec.dtype)


def _weights(part: Part) -> Sequence:
    return getattr(part.operation, "weights", ())


class _Measured:
    """What is found out while a model is called.

    Args:
        parts: of the model.
        timed: does it.
        advance: is told of each part when it is first timed.
    """

    def __init__(self, parts: Sequence[Part], timed: TimedCalls, advance: Callable[[], None]):
        self._number = {part.key: i for i, part in enumerate(parts)}
        self._timed, self._advance = timed, advance
        self._is_timing = False
        self._calls: dict[int, list[TimedCall | InProportion]] = {}
        self._bytes: collections.Counter[int] = collections.Counter()
        self.crossing = CrossingBytes(len(parts))

    def has(self, part: Part) -> bool:
        """Whether a call of it is timed."""
        return self._number[part.key] in self._calls

    def call(
        self,
        key: tuple,
        operation: keras.Operation,
        timed_call: Callable,
        call: Callable,
        args: tuple,
        kwargs: dict,
    ) -> object:
        """`call(*args, **kwargs)`, which is that of `operation`, timed if it is a part of this key.

        What the timing itself calls is called as it is. A layer of Keras's that gives back what it
        is given, as `Dropout` in inference, costs nothing.

        Args:
            timed_call: is timed, with the same arguments.
        """
        number = self._number.get(key)
        if number is None or self._is_timing:
            return call(*args, **kwargs)
        if number not in self._calls:
            self._advance()
        outputs = call(*args, **kwargs)
        tensors = [x for x in keras.tree.flatten(outputs) if isinstance(x, tf.Tensor)]
        own = self._calls.setdefault(number, [])
        is_given_back = {*map(id, tensors)} <= {*map(id, keras.tree.flatten((args, kwargs)))}
        if not (is_given_back and is_method_of_keras(type(operation), "call")):
            with self._timing():
                own.append(self._timed.add(operation, timed_call, args, kwargs))
        self.crossing.take(number, (args, kwargs))
        self.crossing.make(number, outputs)
        self._bytes[number] += sum(map(nbytes, tensors))
        return outputs

    def finish(self) -> None:
        """Times what has been called and not timed."""
        with self._timing():
            self._timed.finish()

    @contextlib.contextmanager
    def _timing(self) -> Iterator[None]:
        self._is_timing = True
        try:
            yield
        finally:
            self._is_timing = False

    @property
    def is_timing(self) -> bool:
        """Whether a layer is called to time it."""
        return self._is_timing

    def costs(self, seconds_per_byte: float, trained: Sequence[int]) -> list[Cost]:
        """Of each part; nothing of one that is not called.

        Args:
            seconds_per_byte: that is sent.
            trained: bytes of the weights of each part that are trained.
        """
        crossing = enumerate(zip(self.crossing.behind_parts(), trained, strict=True))
        return [
            Cost(
                sum(call.seconds for call in self._calls.get(i, ())),
                self._bytes[i],
                sent * seconds_per_byte,
                2 * weights * seconds_per_byte,
            )
            for i, (sent, weights) in crossing
        ]


def _is_measured(
    model: keras.Model, parts: Sequence[Part], inputs: object, measured: _Measured
) -> bool:
    """Calls the model, its parts timed, as far as it can be called; False where that is not all."""
    if functional_graph(model) is not None and inputs is None:
        inputs = _zeros(functional_graph(model))
    is_called = inputs is not None and type(model).call is not keras.Layer.call
    try:
        with _timed_parts(model, parts, measured):
            if is_called:
                measured.crossing.give(inputs)
                outputs = model(inputs, training=False)
                measured.crossing.take(len(parts) - 1, outputs)  # the loss is on the last stage
            for each in _functional_members(model):
                own = [part for part in parts if part.models[:1] == (each,)]
                if own and not any(map(measured.has, own)):  # only a `train_step` does
                    each(_zeros(functional_graph(each)), training=False)
            measured.finish()
    except Exception as error:  # whatever a user's `call` makes of inputs that are not for it
        warnings.warn(
            f"The layers of model '{model.name}' count by their numbers of weights, as it "
            f"cannot be called with a batch's inputs: {error}",
            stacklevel=2,
        )
        return False
    return is_called or all(map(measured.has, parts))


def _functional_members(model: keras.Model) -> list[keras.Model]:
    own = [each.operation for each in members(model) if isinstance(each.operation, keras.Model)]
    return [each for each in own if functional_graph(each) is not None]


def _zeros(graph: Functional) -> object:
    return keras.tree.map_structure(lambda x: zeros_like_spec(x, ROWS), graph.input)


class _CalledParts:
    """Calls of parts that are timed, each known by the calls that it is within."""

    def __init__(self, measured: _Measured):
        self._measured = measured
        self._around: list[Calls] = [()]

    def run_graph(
        self,
        graph: Functional,
        own: Sequence,
        original: Callable,
        inputs: object,
        operation_fn: Callable,
        **rest: object,
    ) -> object:
        """In the place of `Function._run_through_graph`, which keeps all tensors to the end."""
        if self._measured.is_timing:
            return original(inputs, operation_fn, **rest)
        wanted = collections.Counter(id(x) for member in own for x in member.node.input_tensors)
        wanted.update(map(id, graph.outputs))
        tensors = dict(zip(map(id, graph.inputs), keras.tree.flatten(inputs), strict=True))
        for member in own:
            tensors.update(self._outputs(member, operation_fn(member.operation), tensors))
            wanted.subtract(map(id, member.node.input_tensors))
            for x in (*member.node.input_tensors, *member.node.outputs):
                if not wanted[id(x)]:
                    tensors.pop(id(x), None)
        outputs = [tensors[id(x)] for x in graph.outputs]
        return keras.tree.pack_sequence_as(outputs_structure(graph), outputs)

    def _outputs(self, member: Member, call: Callable, tensors: Mapping) -> Iterable[tuple]:
        args, kwargs = member.node.arguments.fill_in(tensors)
        key = member.key(self._around[-1])
        self._around.append(member.within(self._around[-1]))
        # Keras's graph remembers a default of `training`, in the place of which `call` gives it.
        outputs = self._measured.call(key, member.operation, call, call, args, kwargs)
        self._around.pop()
        return zip(map(id, member.node.outputs), keras.tree.flatten(outputs))

    def call_layer(
        self, layer: keras.Layer, original: Callable, *args: object, **kwargs: object
    ) -> object:
        """In the place of `layer.call`."""
        key = self._around[-1], id(layer)
        return self._measured.call(key, layer, layer, original, args, kwargs)


@contextlib.contextmanager
def _timed_parts(model: keras.Model, parts: Sequence[Part], measured: _Measured) -> Iterator[None]:
    """Within it, parts are timed where they are called."""
    timed = _CalledParts(measured)
    models = {id(each): each for part in parts for each in (model, *part.models)}.values()
    graphs = [(functional_graph(each), each) for each in models]
    layers = {id(part.operation): part.operation for part in parts if part.node is None}
    with contextlib.ExitStack() as hooks:
        for graph, each in graphs:
            if graph is not None:
                noting = functools.partial(timed.run_graph, graph, members(each))
                hooks.enter_context(
                    shadowed(
                        graph,
                        "_run_through_graph",
                        wrapped(graph, "_run_through_graph", noting),
                        during="the measuring of layers",
                        why="The layers of a graph are timed as they are called.",
                    )
                )
        for layer in layers.values():
            hooks.enter_context(
                shadowed(
                    layer,
                    "call",
                    wrapped(layer, "call", functools.partial(timed.call_layer, layer)),
                    during="the measuring of layers",
                    why="A layer of a subclassed model is timed as it is called.",
                )
            )
        yield


@contextlib.contextmanager
def _shown_progress(count: int) -> Iterator[Callable[[], None]]:
    """A line in the terminal, if there is one, that tells how far it is; gives what moves it on."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Measuring layers for the pipeline", total=count)
        yield functools.partial(progress.advance, task)
