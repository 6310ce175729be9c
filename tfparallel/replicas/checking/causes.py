"""Why a step under a strategy may differ from one device's, each cause tried on the step itself.

A cause explains a difference if the step without it is equal: layers that draw random numbers and
BatchNorm are put into inference mode, compression is left out. What cannot be left out is seen on
one device alone: a step that is another one each time, and a loss that couples rows.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfparallel.communication.compression.compressor import Compressor
from tfparallel.internals import GLOBAL_SEED_GENERATOR, global_state
from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import compile_loss_of, layers_of, seed_generators_of
from tfparallel.replicas.checking.pair import Pair
from tfparallel.replicas.checking.step import StepOutcome, TracedStep, variables_of
from tfparallel.replicas.compressed_gradients import CompressedGradients

_COUPLED = 1e-3  # relative; far above what rounding does to a loss


def explain(pair: Pair) -> tuple[list[str], bool]:
    """Sentences on what was found, and whether that is why the steps differ.

    Args:
        pair: of models whose steps differ; `Pair` of `check.py`.
    """
    training_only = _training_only(pair)
    with _inference_mode(pair, training_only), _uncompressed(pair.strategy) as compressor:
        found = list(training_only.values())
        if compressor is not None:
            found.append(f"Gradients are compressed by {compressor!r}, which is lossy.")
        without = bool(found) and all(each.is_equal for each in pair.differences())
    if pair.all_ranks(without):
        return [*found, "Without that the step is equal within rounding."], True
    if found:
        found.append("But the step without that differs, too.")
    on_one_device = _seen_on_one_device(pair)
    return [*found, *on_one_device], bool(on_one_device)


# ---- what can be left out ------------------------------------------------------------------------


def _training_only(pair: Pair) -> dict[int, str]:
    """Layers that compute in training what differs by replica by design: why, by their index."""
    drawing = _indices_of_drawing_layers(pair)
    found = {}
    for i, layer in enumerate(layers_of(pair.distributed)):
        name = f"{type(layer).__name__} '{layer.name}'"
        if i in drawing:
            found[i] = f"{name} draws random numbers, and each replica draws its own."
        elif isinstance(layer, keras.layers.BatchNormalization) and _is_alone(layer):
            found[i] = (
                f"{name} normalises by the statistics of each replica's own rows; "
                "synchronized=True takes those of all rows."
            )
    return found


def _is_alone(layer: keras.layers.BatchNormalization) -> bool:
    return layer.trainable and not layer.synchronized


def _indices_of_drawing_layers(pair: Pair) -> set[int]:
    """Layers whose seeds a step on one device moves on, and RNNs around such a cell."""
    pair.step_on_one_device(TracedStep(pair.one_device))
    start = dict(zip(map(id, variables_of(pair.one_device)), pair.state, strict=True))

    def draws(layer: keras.Layer) -> bool:
        states = [
            generator.state
            for generator in seed_generators_of(layer)
            if id(generator.state) in start
        ]
        return any(not np.array_equal(start[id(state)], state.numpy()) for state in states)

    def has_drawing_cell(layer: keras.Layer) -> bool:
        return isinstance(layer, keras.layers.RNN) and any(map(draws, layers_of(layer)))

    layers = enumerate(layers_of(pair.one_device))
    return {i for i, layer in layers if draws(layer) or has_drawing_cell(layer)}


@contextlib.contextmanager
def _inference_mode(pair: Pair, indices: Iterable[int]) -> Iterator[None]:
    """Within it, these layers of both models compute as if they were not trained."""
    layers = [
        layer
        for model in (pair.one_device, pair.distributed)
        for i, layer in enumerate(layers_of(model))
        if i in indices and "training" in inspect.signature(layer.call).parameters
    ]
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(
                shadowed(
                    layer,
                    "call",
                    _untrained(layer.call),
                    during="a step of strategy.check",
                    why="A layer computes as in inference, to see whether that is the difference.",
                )
            )
        yield


def _untrained(call: Callable) -> Callable:
    @functools.wraps(call)
    def untrained(*args: object, **kwargs: object) -> object:
        return call(*args, **{**kwargs, "training": False})

    return untrained


@contextlib.contextmanager
def _uncompressed(strategy: tf.distribute.Strategy) -> Iterator[Compressor | None]:
    """Within it, gradients are sent as they are; gives the compressor that is left out, if any."""
    workers = strategy.extended._workers or strategy.extended
    compresses = isinstance(workers, CompressedGradients) and workers._num_workers > 1
    if not compresses or workers._compressor is None:
        yield None
        return
    compressor, workers._compressor = workers._compressor, None
    try:
        yield compressor
    finally:
        workers._compressor = compressor


# ---- what is seen on one device ------------------------------------------------------------------


def _seen_on_one_device(pair: Pair) -> list[str]:
    found = []
    step = TracedStep(pair.one_device)
    first, second = pair.step_on_one_device(step), pair.step_on_one_device(step)
    if not _are_same(first, second):
        found.append(
            "The step is another one each time, also on one device: it draws from something other "
            "than Keras's seed generators, such as tf.random."
        )
    if _draws_from_global_generator(pair):
        found.append(
            "The model draws from Keras's global generator (keras.random without a seed), and "
            "each replica draws its own numbers."
        )
    if _couples_rows(pair.one_device, pair.batch):
        found.append(
            "The loss is a function of all rows together: neither the mean nor the sum of the "
            "losses of two halves of the batch. A replica computes that of its own rows."
        )
    return found


def _are_same(one: StepOutcome, other: StepOutcome) -> bool:
    pairs = zip(one.copies, other.copies, strict=True)
    return all(np.array_equal(a[0], b[0], equal_nan=True) for a, b in pairs)


def _draws_from_global_generator(pair: Pair) -> bool:
    before = pair.random["keras"]
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if before is None:
        return generator is not None
    return not np.array_equal(before, keras.ops.convert_to_numpy(generator.state))


def _couples_rows(model: keras.Model, batch: object) -> bool:
    """Whether the compiled loss of the batch is neither the sum nor the mean of its halves'."""
    compute = compile_loss_of(model)
    if compute is None:
        return False
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    y_pred = model(x, training=False)
    leaves = [leaf for leaf in keras.tree.flatten((y, y_pred)) if leaf is not None]
    num_rows = leaves[0].shape[0]
    if num_rows < 2 or any(leaf.shape[:1] != (num_rows,) for leaf in leaves):
        return False

    def loss(start: int, end: int) -> float:
        rows = keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[start:end], (y, y_pred, weight)
        )
        return float(tf.reduce_sum(compute(*rows)))

    half = num_rows // 2
    first, second, whole = loss(0, half), loss(half, num_rows), loss(0, num_rows)
    mean = (half * first + (num_rows - half) * second) / num_rows
    close = [
        abs(each - whole) <= _COUPLED * max(abs(whole), abs(each))
        for each in (mean, first + second)
    ]
    return not any(close)
