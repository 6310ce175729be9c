"""Each row draws random numbers of its own: those that one device draws for it, on any mesh.

    one device       rows 0 .. 7 of a batch      draw [seed, counter] for 8 rows
    replica 0        rows 0 .. 3                 the first half of that
    replica 1        rows 4 .. 7                 the second half

So a batch and a seed give one result, however many devices divide the rows. By default replicas
draw streams of their own (`seed_hooks.py`), which needs no knowledge of what draws.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfparallel.internals import distribute_lib
from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.internals.keras_layers import (
    MASKS_OF_CELL,
    DropoutRNNCell,
    layers_of,
    seed_generators_of,
)
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.row_draws import normal_of_rows, seed_as_drawn, uniform_of_rows

# What alpha dropout does to a number that is dropped, and keeps mean and variance by.
_ALPHA_P = -1.6732632423543772848170429916717 * 1.0507009873554804934193349852946


class RowSeeds:
    """What draws by row in the steps of a strategy.

    Args:
        strategy: whose replicas have rows.
    """

    def __init__(self, strategy: Callable[[], tf.distribute.Strategy]):
        self._strategy = strategy
        self._thread = threading.local()
        self._is_active = False

    @contextlib.contextmanager
    def during(self, model: keras.Model) -> Iterator[None]:
        """Around a step of `model`: its layers draw by row.

        Raises:
            ValueError: for layers that draw in a way that is not known here.
        """
        unknown = [layer for layer in layers_of(model) if not self._hook(layer)]
        if unknown:
            names = ", ".join(f"'{x.name}' ({type(x).__name__})" for x in unknown)
            raise ValueError(
                'seed_by="row" knows how Dropout, SpatialDropout, GaussianNoise, GaussianDropout, '
                "AlphaDropout, MultiHeadAttention and recurrent layers draw for a row. "
                f"Received: {names}, in model '{model.name}'. Take other layers, put them into the "
                'input pipeline, or take seed_by="replica".'
            )
        before, self._is_active = self._is_active, True
        try:
            yield
        finally:
            self._is_active = before

    # ---- rows ------------------------------------------------------------------------------------

    def place(self) -> tf.Tensor | None:
        """Where the caller's rows begin and how many there are, int32 `[2]`; None for all rows."""
        given = getattr(self._thread, "place", None)
        if given is not None:
            return given
        step = current_replica_step()
        if step is None or step.has_all_rows:
            return None
        if step.first_row is None:
            raise ValueError(
                'seed_by="row" needs to know which rows of a batch a replica has. Received: a '
                "dataset that is distributed already. Give fit the dataset as it is."
            )
        return tf.stack([tf.cast(step.first_row, tf.int32), tf.cast(step.rows, tf.int32)])

    @contextlib.contextmanager
    def placed(self, place: tf.Tensor | None, part: object) -> Iterator[None]:
        """Within it, the caller traces a part of the step, for rows at a `place` that it is given.

        Args:
            part: by which a trace of the same part, for other shapes, is known.
        """
        del part
        self._thread.place = place
        try:
            yield
        finally:
            self._thread.place = None

    # ---- draws -----------------------------------------------------------------------------------

    def seed_of(self, generator: keras.random.SeedGenerator, next_seed: Callable) -> tf.Tensor:
        """What `generator` gives to the caller, in a replica.

        Raises:
            ValueError: if that is no layer which draws by row.
        """
        self._check_is_drawn_here(generator)
        return next_seed()

    def _check_is_drawn_here(self, generator: keras.random.SeedGenerator) -> None:
        if not self._is_active or not getattr(self._thread, "is_drawing", False):
            raise ValueError(
                'seed_by="row" draws for layers of a model in a step of Keras, as `fit` has. '
                f"Received: a draw from '{generator.name}' by something else. Take "
                'seed_by="replica", or a layer such as keras.layers.Dropout.'
            )

    def _drawn(self, generator: keras.random.SeedGenerator) -> tf.Tensor:
        """The next seed `[2]`, int32, as Keras gives it to TensorFlow."""
        self._thread.is_drawing = True
        try:
            return seed_as_drawn(generator.next())
        finally:
            self._thread.is_drawing = False

    def _numbers(
        self,
        draw: Callable,
        generator: keras.random.SeedGenerator,
        shape: Sequence[int | tf.Tensor] | tf.Tensor,
        dtype: tf.DType | str,
        is_of_rows: bool = True,
    ) -> tf.Tensor:
        """`draw`, a function of `row_draws.py`, for the caller's rows.

        Args:
            is_of_rows: False where one draw is for all rows.
        """
        seed, shape = self._drawn(generator), tf.cast(shape, tf.int32)
        place, first = self.place() if is_of_rows else None, tf.constant(0)
        if place is not None:  # a layer may have several rows for one of the batch
            first = place[0] * (shape[0] // tf.maximum(place[1], 1))
        return draw(shape, first, seed, tf.as_dtype(dtype))

    # ---- layers ----------------------------------------------------------------------------------

    def _hook(self, layer: keras.Layer) -> bool:
        """Has `layer` draw by row; False if it draws otherwise."""
        if not seed_generators_of(layer):
            return True
        for known, method, replacement in _KNOWN:
            if isinstance(layer, known):
                if getattr(type(layer), method) is not getattr(known, method):
                    return False
                hook = functools.partial(_by_row, self, layer, replacement)
                hook_once(
                    layer,
                    method,
                    wrapped(layer, method, hook),
                    why="Rows draw the random numbers that one device draws for them.",
                    mark="_tfparallel_row_hook",
                )
                return True
        return False

    def _is_for_caller(self) -> bool:
        context = distribute_lib.get_replica_context()
        return self._is_active and context is not None and context.strategy is self._strategy()

    def dropped(
        self,
        x: tf.Tensor,
        rate: float,
        noise_shape: Sequence[int | None] | None,
        generator: keras.random.SeedGenerator,
    ) -> tf.Tensor:
        """As `keras.random.dropout`, where a dim of `noise_shape` may be None for that of `x`."""
        if rate >= 1:
            return tf.zeros_like(x)
        numbers = self._uniform(x, noise_shape, generator, x.dtype)
        scaled = x * tf.convert_to_tensor(1 / (1 - rate), x.dtype)
        return tf.where(numbers >= tf.cast(rate, x.dtype), scaled, tf.zeros([], x.dtype))

    def _uniform(
        self,
        x: tf.Tensor,
        noise_shape: Sequence[int | None] | None,
        generator: keras.random.SeedGenerator,
        dtype: tf.DType | str,
    ) -> tf.Tensor:
        own = tf.shape(x)
        sizes = [None] * x.shape.rank if noise_shape is None else noise_shape
        shape = [own[i] if size is None else size for i, size in enumerate(sizes)]
        return self._numbers(uniform_of_rows, generator, shape, dtype, sizes[0] is None)


def drawn_by_row(seeds: RowSeeds | None, model: keras.Model) -> contextlib.AbstractContextManager:
    """Around a step of `model`: its layers draw by row, where a strategy has them do so."""
    return contextlib.nullcontext() if seeds is None else seeds.during(model)


def _by_row(
    seeds: RowSeeds,
    layer: keras.Layer,
    replacement: Callable,
    original: Callable,
    *args: object,
    **kwargs: object,
) -> tf.Tensor:
    if not seeds._is_for_caller():
        return original(*args, **kwargs)
    return replacement(seeds, layer, *args, **kwargs)


def _dropout(
    seeds: RowSeeds, layer: keras.Layer, inputs: tf.Tensor, training: bool | None = False
) -> tf.Tensor:
    if not training or layer.rate <= 0:
        return inputs
    return seeds.dropped(inputs, layer.rate, layer.noise_shape, layer.seed_generator)


def _spatial_dropout(
    seeds: RowSeeds, layer: keras.Layer, inputs: tf.Tensor, training: bool | None = False
) -> tf.Tensor:
    if not training or layer.rate <= 0:
        return inputs
    channels = 1 if getattr(layer, "data_format", None) == "channels_first" else -1
    noise_shape: list = [1] * inputs.shape.rank
    noise_shape[0] = noise_shape[channels] = None
    return seeds.dropped(inputs, layer.rate, noise_shape, layer.seed_generator)


def _gaussian_noise(
    seeds: RowSeeds, layer: keras.Layer, inputs: tf.Tensor, training: bool | None = False
) -> tf.Tensor:
    if not training or layer.stddev <= 0:
        return inputs
    return inputs + _normal(seeds, layer, inputs) * layer.stddev


def _gaussian_dropout(
    seeds: RowSeeds, layer: keras.Layer, inputs: tf.Tensor, training: bool | None = False
) -> tf.Tensor:
    if not training or layer.rate <= 0:
        return inputs
    deviation = math.sqrt(layer.rate / (1.0 - layer.rate))
    return inputs * (_normal(seeds, layer, inputs) * deviation + 1)


def _normal(seeds: RowSeeds, layer: keras.Layer, inputs: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(inputs)
    return seeds._numbers(normal_of_rows, layer.seed_generator, shape, layer.compute_dtype)


def _alpha_dropout(
    seeds: RowSeeds, layer: keras.Layer, inputs: tf.Tensor, training: bool | None = False
) -> tf.Tensor:
    if not training or layer.rate <= 0:
        return inputs
    floatx = keras.config.floatx()
    numbers = seeds._uniform(inputs, layer.noise_shape, layer.seed_generator, floatx)
    kept = tf.cast(numbers >= layer.rate, inputs.dtype)
    a = ((1 - layer.rate) * (1 + layer.rate * _ALPHA_P**2)) ** -0.5
    return a * (inputs * kept + _ALPHA_P * (1 - kept)) - a * _ALPHA_P * layer.rate


def _masks_of_cell(
    seeds: RowSeeds, cell: DropoutRNNCell, step_input: tf.Tensor, dropout_rate: float
) -> tf.Tensor | list[tf.Tensor]:
    def mask() -> tf.Tensor:
        return seeds.dropped(tf.ones_like(step_input), dropout_rate, None, cell.seed_generator)

    count = getattr(cell, "dropout_mask_count", None)
    return mask() if count is None else [mask() for _ in range(count)]


# A type of layer, its method that draws, and what stands for that; of two types the first counts.
_KNOWN: tuple[tuple[Any, str, Callable], ...] = (
    (layers.SpatialDropout1D, "call", _spatial_dropout),
    (layers.SpatialDropout2D, "call", _spatial_dropout),
    (layers.SpatialDropout3D, "call", _spatial_dropout),
    (layers.Dropout, "call", _dropout),
    (layers.GaussianNoise, "call", _gaussian_noise),
    (layers.GaussianDropout, "call", _gaussian_dropout),
    (layers.AlphaDropout, "call", _alpha_dropout),
    (DropoutRNNCell, MASKS_OF_CELL, _masks_of_cell),
)
