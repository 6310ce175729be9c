"""Rows draw random numbers of their own, also where microbatches come to a layer in turn.

One device draws once for a batch; a pipeline for each microbatch, in functions that are traced once
for all. So in a step nothing counts: each draw has a number, and what stands for it is

    [seed, counter when the step began + number of the draw]

alike for all microbatches, which differ in their rows. When the step ends the counter is put where
one device leaves it.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator

import keras
import tensorflow as tf

from tfparallel.internals.keras_layers import layers_of, seed_generators_of
from tfparallel.replicas.row_seeds import RowSeeds


class RowSeedsOfStages(RowSeeds):
    """What draws by row in a pipeline."""

    _step: "_Draws | None" = None

    @contextlib.contextmanager
    def counted(self, model: keras.Model) -> Iterator[None]:
        """Around a step of `model` whose variables are on their stages: draws have numbers."""
        self._step = step = _Draws(model)
        try:
            yield
            step.end()
        finally:
            self._step = None

    @contextlib.contextmanager
    def placed(self, place: tf.Tensor | None, part: Hashable) -> Iterator[None]:
        """As `RowSeeds.placed`."""
        assert self._step is not None
        with super().placed(place, part), self._step.within(part):
            yield

    def seed_of(self, generator: keras.random.SeedGenerator, next_seed: Callable) -> object:
        """As `RowSeeds.seed_of`."""
        self._check_is_drawn_here(generator)
        known = None if self._step is None else self._step.draw(generator)
        return next_seed() if known is None else known


class _Draws:
    """The draws of one step of a model."""

    def __init__(self, model: keras.Model):
        self._thread = threading.local()
        self._numbers: dict[Hashable, int] = {}
        generators = [g for layer in layers_of(model) for g in seed_generators_of(layer)]
        self._generators = {id(generator): generator for generator in generators}
        self._begins = {key: tf.identity(g.state.value) for key, g in self._generators.items()}
        self._counts = dict.fromkeys(self._generators, 0)

    @contextlib.contextmanager
    def within(self, part: Hashable) -> Iterator[None]:
        """Within it, draws are those of a part of the step."""
        self._thread.part, self._thread.drawn = part, 0
        try:
            yield
        finally:
            self._thread.part = None

    def draw(self, generator: keras.random.SeedGenerator) -> tf.Tensor | None:
        """The state for the caller's next draw; None for a generator of another model."""
        key = id(generator)
        if key not in self._generators:
            return None
        draw = (key, *self._place_in_step())
        if draw not in self._numbers:
            self._numbers[draw] = self._counts[key]
            self._counts[key] += 1
        begin = self._begins[key]
        return begin + tf.constant([0, self._numbers[draw]], begin.dtype)

    def _place_in_step(self) -> tuple:
        """By which the same draw is known for each microbatch."""
        part = getattr(self._thread, "part", None)
        name = "alone" if part is None else "drawn"
        number = getattr(self._thread, name, 0)
        setattr(self._thread, name, number + 1)
        return part, number

    def end(self) -> None:
        """Puts counters where one device leaves them."""
        for key, generator in self._generators.items():
            if self._counts[key]:
                begin = self._begins[key]
                end = begin + tf.constant([0, self._counts[key]], begin.dtype)
                generator.state.assign(end)
