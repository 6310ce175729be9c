"""How long each part of a model takes, forward and backward, and how many bytes it makes.

Every part is run by itself on what the parts before it have made of one microbatch, outside of the
step, as in inference. Nothing of the model changes (`no_trace.py`).
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from rich.console import Console
from rich.progress import track

from tfparallel.pipeline.memory import num_elements
from tfparallel.pipeline.no_trace import without_trace

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


def profile_parts(model: keras.Model, graph: Any, parts: Sequence, inputs: Any) -> list[Cost]:
    """The cost of each part.

    Args:
        model: built.
        graph: its functional graph; None for a subclassed model.
        parts: `Part`s, in the order in which they run.
        inputs: what the model is called with, a nest of tensors of a microbatch's rows; None where
            that is not known: the parts of a functional model are then measured on 8 rows of
            zeros, and the weights of those of a subclassed model counted.
    """
    with tf.init_scope(), without_trace(model):
        if graph is not None:
            return _profile_nodes(graph, parts, inputs)
        if inputs is None:
            return [Cost(1.0 + sum(map(num_elements, part.operation.weights))) for part in parts]
        return _profile_layers(model, parts, inputs)


def zeros_like_spec(spec: Any, rows: int) -> tf.Tensor:
    """Zeros of a symbolic tensor's shape and type, in `rows` rows; 1 where a size is unknown."""
    shape = [rows, *(1 if size is None else size for size in spec.shape[1:])]
    return tf.zeros(shape, spec.dtype)


def _profile_nodes(graph: Any, parts: Sequence, inputs: Any) -> list[Cost]:
    if inputs is None:
        flat = [zeros_like_spec(x, ROWS) for x in graph.inputs]
    else:
        flat = graph._standardize_inputs(inputs)
    tensors = dict(zip(map(id, graph.inputs), flat, strict=True))
    costs = []
    for part in _shown(parts):
        args, kwargs = part.node.arguments.fill_in(tensors)
        operation = graph._get_operation_for_node(part.node)
        cost, outputs = _measured(operation, args, kwargs)
        tensors.update(zip(map(id, part.node.outputs), outputs, strict=True))
        costs.append(cost)
    return costs


def _profile_layers(model: keras.Model, parts: Sequence, inputs: Any) -> list[Cost]:
    calls: dict[int, list[tuple]] = {id(part.operation): [] for part in parts}
    with _noted_calls([part.operation for part in parts], calls):
        model(inputs, training=False)
    costs = []
    for part in _shown(parts):
        measured = [
            _measured(part.operation, args, kwargs)[0] for args, kwargs in calls[id(part.operation)]
        ]
        costs.append(Cost(*(sum(numbers) for numbers in zip(Cost(0.0), *measured, strict=True))))
    return costs


@contextlib.contextmanager
def _noted_calls(layers: Sequence, calls: dict[int, list[tuple]]) -> Iterator[None]:
    """Within it, the arguments of each layer's calls are put into `calls[id(layer)]`."""

    def note(layer: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
        calls[id(layer)].append((args, kwargs))
        return original(*args, **kwargs)

    for layer in layers:
        noted = functools.partial(note, layer, layer.call)
        vars(layer)["call"] = functools.wraps(layer.call)(noted)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("call")


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
