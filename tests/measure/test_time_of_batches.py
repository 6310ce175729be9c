"""What a batch takes that is not tf.data's: a PyDataset, a Python generator, arrays. All train."""

import re
import time

import keras
import numpy as np
import pytest

from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tfparallel.callbacks import Measure

BATCHES, ROWS, PAUSE_S = 6, 4, 0.1


class Clock:
    """How long batches have slept, by their own look at the clock; none sleeps before it is on."""

    def __init__(self):
        self.is_on, self.slept_s = False, 0.0

    def sleep(self):
        if self.is_on:
            began_s = time.perf_counter()
            time.sleep(PAUSE_S)
            self.slept_s += time.perf_counter() - began_s


class Slow(keras.utils.PyDataset):
    """On one thread, as it is by default."""

    def __init__(self, clock):
        super().__init__(workers=1)
        self._clock, self._data = clock, tiny_data(BATCHES * ROWS)

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        self._clock.sleep()
        return tuple(each[index * ROWS : (index + 1) * ROWS] for each in self._data)


def generator(clock):
    """Without an end, as Keras wants them."""
    batches = Slow(clock)
    while True:
        yield from (batches[i] for i in range(BATCHES))


class TurnOn(keras.callbacks.Callback):
    """Before the second epoch: the first one traces."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def on_epoch_begin(self, epoch, logs=None):
        self._clock.is_on = epoch == 1


def trained(data, clock, **options):
    """The records of two epochs, and what is said of the second one."""
    measure, told = Measure(verbose=0), []

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            told.append(measure.verdict)

    keras.utils.set_random_seed(7)
    model = tiny_model()
    model.compile("sgd", **tiny_compile_options())
    callbacks = [TurnOn(clock), measure, Reads()]
    model.fit(*data, epochs=2, verbose=0, shuffle=False, callbacks=callbacks, **options)
    assert [(each.steps, each.rows) for each in measure.records] == [(BATCHES, BATCHES * ROWS)] * 2
    return measure.records, told[-1]


KINDS = {
    "PyDataset": (lambda clock: (Slow(clock),), {}),
    "generator": (lambda clock: (generator(clock),), {"steps_per_epoch": BATCHES}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_sleeps_is_waited_for_as_long(kind):
    """Keras reads a batch ahead or two, so that as many sleeps may fall into another epoch."""
    make, options = KINDS[kind]
    clock = Clock()
    (_, after), verdict = trained(make(clock), clock, **options)
    waited_s = after.seconds["input"]
    assert waited_s >= (BATCHES - 3) * PAUSE_S  # a step hides a part of the sleep beside it
    assert waited_s <= after.wall_s
    assert verdict.cause in ("input: generator", "input")
    each_ms = float(re.search(r"([\d.]+) ms a step", verdict.text)[1])
    assert each_ms == pytest.approx(waited_s / BATCHES * 1e3, abs=0.05)
    stage = after.details["input_stage"]
    assert stage["kind"] == "generator"
    # tf.data's own mean, over both epochs where they have one iterator; seen last at step 4 of 6.
    assert stage["ms"] >= 0.15 * PAUSE_S * 1e3


def test_arrays_are_there():
    """Copied out of memory: a batch takes a small part of one that sleeps."""
    clock = Clock()
    data = tiny_data(BATCHES * ROWS)
    (_, after), _ = trained(data, clock, batch_size=ROWS)
    slow = Clock()
    (_, sleeping), _ = trained((Slow(slow),), slow)
    assert 0 < after.seconds["input"] < sleeping.seconds["input"] / 2
    assert clock.slept_s == 0 and slow.slept_s > 0
    assert np.isfinite(after.details["input_stage"].get("ms", 0.0))
