"""How long each part of a model takes, forward and backward, and how many bytes it makes.

Every part is run by itself on what the parts before it have made of one microbatch, outside of the
step, as in inference. Nothing of the model changes (`no_trace.py`).
"""

import contextlib
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from rich.console import Console
from rich.progress import track

from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import functional_graph, outputs_structure
from tfparallel.pipeline.memory import num_values
from tfparallel.pipeline.no_trace import without_trace
from tfparallel.pipeline.parts import Calls, Part, members

ROWS = 8  # where no batch is known: enough to outweigh the cost of a call
_REPEATS = 3


class Cost(NamedTuple):
    """What one part needs for one microbatch.

    Attributes:
        time: of its forward and its backward pass, seconds; for a subclassed model of which no
            batch is known, its number of weights.
        activation_bytes: of its outputs.
    """

    time: float
    activation_bytes: int = 0


def profile_parts(model: keras.Model, parts: Sequence[Part], inputs: Any) -> list[Cost]:
    """The cost of each part, of all its calls together.

    Args:
        model: built.
        parts: of the model, in the order in which they run.
        inputs: what the model is called with, a nest of tensors of a microbatch's rows; None where
            that is not known. A functional model, and those in a subclassed one that this does not
            call, are then measured on 8 rows of zeros. If that is not all, weights are counted.
    """
    with tf.init_scope(), without_trace(model):
        calls = _calls_of(model, parts, inputs)
        if calls is None:
            return [Cost(1.0 + sum(map(num_values, _weights(part)))) for part in parts]
        return [_cost(part, own) for part, own in zip(_shown(parts), calls, strict=True)]


def slowest(costs: Sequence[Sequence[Sequence]]) -> list[Cost]:
    """What each part costs where it costs most.

    Args:
        costs: by worker and part, each a `Cost` or its list of numbers.
    """
    return [Cost(*map(max, zip(*own, strict=True))) for own in zip(*costs, strict=True)]


def zeros_like_spec(spec: Any, rows: int) -> tf.Tensor:
    """Zeros of a symbolic tensor's shape and type, in `rows` rows; 1 where a size is unknown."""
    shape = [rows, *(1 if size is None else size for size in spec.shape[1:])]
    return tf.zeros(shape, spec.dtype)


def _weights(part: Part) -> Sequence:
    return getattr(part.operation, "weights", ())


def _cost(part: Part, calls: Sequence[tuple]) -> Cost:
    measured = [_measured(part.operation, args, kwargs)[0] for args, kwargs in calls]
    return Cost(*(sum(numbers) for numbers in zip(Cost(0.0), *measured, strict=True)))


def _calls_of(model: keras.Model, parts: Sequence[Part], inputs: Any) -> list[list[tuple]] | None:
    """The arguments of each part's calls, as far as a model can be called; None where they lack."""
    calls: dict[tuple, list[tuple]] = {part.key: [] for part in parts}
    if functional_graph(model) is not None and inputs is None:
        inputs = _zeros(functional_graph(model))
    is_called = inputs is not None and type(model).call is not keras.Layer.call
    try:
        with _noted_calls(model, parts, calls):
            if is_called:
                model(inputs, training=False)
            for each in _functional_members(model):
                own = [part for part in parts if part.models[:1] == (each,)]
                if own and not any(calls[part.key] for part in own):  # only a `train_step` does
                    each(_zeros(functional_graph(each)), training=False)
    except Exception as error:  # whatever a user's `call` makes of inputs that are not for it
        warnings.warn(
            f"The layers of model '{model.name}' are divided by their numbers of weights, as it "
            f"cannot be called with a batch's inputs: {error}",
            stacklevel=2,
        )
        return None
    return list(calls.values()) if is_called or all(calls.values()) else None


def _functional_members(model: keras.Model) -> list[keras.Model]:
    own = [each.operation for each in members(model) if isinstance(each.operation, keras.Model)]
    return [each for each in own if functional_graph(each) is not None]


def _zeros(graph: Any) -> Any:
    return keras.tree.map_structure(lambda x: zeros_like_spec(x, ROWS), graph.input)


@contextlib.contextmanager
def _noted_calls(
    model: keras.Model, parts: Sequence[Part], calls: dict[tuple, list[tuple]]
) -> Iterator[None]:
    """Within it, the arguments of the calls of each part are put into `calls`, by `Part.key`."""
    around: list[Calls] = [()]

    def run(
        graph: Any, own: Sequence, _: Callable, inputs: Any, operation_fn: Any, **__: Any
    ) -> Any:
        tensors = dict(zip(map(id, graph.inputs), keras.tree.flatten(inputs), strict=True))
        for member in own:
            args, kwargs = member.node.arguments.fill_in(tensors)
            if (key := member.key(around[-1])) in calls:
                calls[key].append((args, kwargs))
            around.append(member.within(around[-1]))
            outputs = operation_fn(member.operation)(*args, **kwargs)
            around.pop()
            tensors.update(zip(map(id, member.node.outputs), keras.tree.flatten(outputs)))
        outputs = [tensors[id(x)] for x in graph.outputs]
        return keras.tree.pack_sequence_as(outputs_structure(graph), outputs)

    def note(layer: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if (key := (around[-1], id(layer))) in calls:
            calls[key].append((args, kwargs))
        return original(*args, **kwargs)

    models = {id(each): each for part in parts for each in (model, *part.models)}.values()
    graphs = [(functional_graph(each), each) for each in models]
    layers = {id(part.operation): part.operation for part in parts if part.node is None}
    with contextlib.ExitStack() as hooks:
        for graph, each in graphs:
            if graph is not None:
                noting = functools.partial(run, graph, members(each))
                hooks.enter_context(
                    shadowed(
                        graph,
                        "_run_through_graph",
                        wrapped(graph, "_run_through_graph", noting),
                        during="the measuring of layers",
                        why="What the layers of a graph are called with is noted, to time them.",
                    )
                )
        for layer in layers.values():
            hooks.enter_context(
                shadowed(
                    layer,
                    "call",
                    wrapped(layer, "call", functools.partial(note, layer)),
                    during="the measuring of layers",
                    why="What a subclassed model calls a layer with is noted, to time it.",
                )
            )
        yield


def _measured(operation: Any, args: Any, kwargs: Any) -> tuple[Cost, list]:
    """The cost of `operation(*args, **kwargs)`, and its outputs in a list."""
    inputs = [x for x in tf.nest.flatten((args, kwargs)) if _is_differentiable(x)]
    weights = [w.value for w in getattr(operation, "trainable_weights", ())]
    times_s = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = keras.tree.flatten(operation(*args, **kwargs))
        tape.gradient([y for y in outputs if _is_differentiable(y)], [*inputs, *weights])
        times_s.append(time.perf_counter() - started)
    size = sum(y.dtype.size * int(tf.size(y)) for y in outputs if isinstance(y, tf.Tensor))
    return Cost(statistics.median(times_s[1:]), size), outputs


def _shown(parts: Sequence) -> Iterator[Any]:
    """The parts, with a line in the terminal, if there is one, that tells how far they are."""
    console = Console(stderr=True)
    yield from track(
        parts,
        "Measuring layers for the pipeline",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating
