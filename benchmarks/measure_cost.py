"""What measuring costs a step.

    nice -n -10 python benchmarks/measure_cost.py --seconds 300 --models MLP convnet

In one training, of one compiled model, `Measure` is there in a few steps and away in a few others.
Which of two blocks comes first is drawn, so that what the machine does else falls on both alike;
the first step of a block is left out, as caches hold the other's. Of the differences within
hundreds of pairs of blocks Hodges' and Lehmann's estimate is told with its interval of 95 %: the
median of the means of any two, which a few large ones do not move
(https://doi.org/10.1214/aoms/1177704172).

Computing scatters by more than measuring takes. But all that `Measure` does in a step, it does
before the step has its batch: between steps, and at the iterator. So that is timed by itself, from
the moment in which Keras asks for a step to the one in which the model's first layer has its rows,
in all steps alike. Of a block the shortest counts, as in `timeit`: other programs only make it
longer. Whole steps, in wall time and in CPU time of all threads, are compared beside it.

With the noise scale the training is one of two replicas on two logical CPUs, and each step that is
measured notes squares of gradients; of `noise_every=100`, a hundredth of what that adds is told.
"""

import argparse
import dataclasses
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.callbacks import Measure
from tfparallel.callbacks.fit_clock import FitClock
from tfparallel.internals import ResourceVariable

EVERY = 100  # the noise_every of which the cost is told
BLOCK = 4  # steps, but for the first one
SECONDS = 300.0
WARM_UP = 8  # pairs, not told
NORMAL = 1.96  # standard deviations that hold 95 %
WIDTH = 1800  # 10 M parameters in three layers


class Problem(NamedTuple):
    """A model that is not compiled, and its rows for one step, which is repeated."""

    model: keras.Model
    x: np.ndarray


class Estimate(NamedTuple):
    """Of what measuring adds to a step, in seconds, with an interval that holds it in 95 %."""

    seconds: float
    low_s: float
    high_s: float

    def told(self, step_s: float) -> str:
        """In microseconds, and as a share of a step."""
        low, high = (each / step_s for each in (self.low_s, self.high_s))
        share = f"{self.seconds / step_s:+.2%} ({low:+.2%} to {high:+.2%})"
        return f"{self.seconds * 1e6:+.0f} us = {share}"

    def part(self, share: float, whole: "Estimate") -> "Estimate":
        """This, with `share` of the way from here to `whole`."""
        return Estimate(*(a + share * (b - a) for a, b in zip(self, whole, strict=True)))


@dataclass(frozen=True)
class Cost:
    """Of one model.

    Attributes:
        model: its name, and what is measured of it.
        pairs: how many were compared.
        step_s: without measuring, median.
        before: of the time until a step has its batch.
        wall: of the time of a step.
        cpu: of what all threads of the process compute in a step.
        is_equal: whether weights are the same bits as without.
    """

    model: str
    pairs: int
    step_s: float
    before: Estimate
    wall: Estimate
    cpu: Estimate
    is_equal: bool

    def __str__(self) -> str:
        before, wall, cpu = (each.told(self.step_s) for each in (self.before, self.wall, self.cpu))
        return (
            f"{self.model}: step {self.step_s * 1e3:.2f} ms, {self.pairs} pairs; until the batch "
            f"is there {before}; wall time {wall}; CPU time {cpu}; weights "
            f"{'equal' if self.is_equal else 'DIFFERENT'}"
        )


class Arrival(keras.layers.Layer):
    """Gives its input as it is, and notes when it was there."""

    def __init__(self) -> None:
        super().__init__()
        with tf.init_scope(), tf.device("CPU:0"):
            self._at_s = ResourceVariable(tf.constant(0.0, tf.float64), trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """The same `[...]`."""
        with tf.control_dependencies([inputs]):
            noted = self._at_s.assign(tf.timestamp())
        with tf.control_dependencies([noted]):
            return tf.identity(inputs)

    @property
    def at_s(self) -> float:
        """Of the last step, seconds since 1970."""
        return float(self._at_s.numpy())


def _mlp() -> Problem:
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    return Problem(_model(*layers, keras.layers.Dense(1)), _normal(64, WIDTH))


def _convnet() -> Problem:
    """Of keras.io's "Simple MNIST convnet", and its batches."""
    return Problem(_of_convolutions(32, 64), _normal(128, 28, 28, 1))


def _least() -> Problem:
    """So small that a step is little more than its operations' overhead."""
    return Problem(_of_convolutions(16, 32), _normal(32, 12, 12, 1))


def _of_convolutions(*filters: int) -> keras.Model:
    layers = keras.layers
    each = [[layers.Conv2D(n, 3, activation="relu"), layers.MaxPooling2D()] for n in filters]
    return _model(*sum(each, []), layers.Flatten(), layers.Dropout(0.5), layers.Dense(1))


def _model(*layers: keras.Layer) -> keras.Model:
    return keras.Sequential([Arrival(), *layers])


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


MODELS = {"MLP of 10 M parameters": _mlp, "MNIST convnet": _convnet, "CNN of 12 x 12": _least}


def open_cpus() -> None:
    """Two, before TensorFlow starts."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, logical)


def measured(seconds: float = SECONDS, words: Sequence[str] = ()) -> Iterator[Cost]:
    """Of the models whose names hold one of `words`, or of all; `open_cpus` comes first.

    Args:
        seconds: of training, for each figure.
        words: parts of names.
    """
    for name, make in MODELS.items():
        if words and not any(each in name for each in words):
            continue
        always = _cost(name, make, seconds)
        yield always
        each = _cost(f"{name}, noise_every=1", make, seconds, noise_every=1)
        yield each
        yield dataclasses.replace(
            each,
            model=f"{name}, noise_every={EVERY}, of both",
            before=always.before,
            wall=always.before.part(1 / EVERY, each.wall),
            cpu=always.cpu.part(1 / EVERY, each.cpu),
        )


def _cost(
    name: str, make: Callable[[], Problem], seconds: float, noise_every: int | None = None
) -> Cost:
    devices = ["CPU:0"] if noise_every is None else ["CPU:0", "CPU:1"]
    turns = _Turns(seconds, noise_every)
    with mock.patch.object(FitClock, "_around_steps", lambda *args: turns.steps(*args)):
        _fit(make, devices, [turns])
    off, on = np.array(turns.pairs[WARM_UP:]).swapaxes(0, 1)
    before, wall, cpu = (hodges_lehmann(each) for each in (on - off).T)
    with_and_without = [Measure(verbose=0, noise_every=noise_every)], []
    weights = [_fit(make, devices, callbacks, 12) for callbacks in with_and_without]
    is_equal = all(np.array_equal(one, other) for one, other in zip(*weights, strict=True))
    return Cost(name, len(on), float(np.median(off[:, 1])), before, wall, cpu, is_equal)


def _fit(
    make: Callable[[], Problem],
    devices: Sequence[str],
    callbacks: Sequence[keras.callbacks.Callback],
    steps: int = -1,
) -> list[np.ndarray]:
    """Weights after a training of so many steps, or of as many as a callback lets it have."""
    keras.utils.set_random_seed(0)
    with tfparallel.MirroredStrategy(devices).scope():
        model, x = make()
        model(x[:1])
        model.compile("sgd", "mse")
    batch = tf.data.Dataset.from_tensors((x, np.zeros((len(x), 1), "float32")))
    model.fit(batch.repeat().take(steps), verbose=0, shuffle=False, callbacks=callbacks)
    return model.get_weights()


class _Turns(Measure):
    """Measures the steps of one of two blocks, again and again.

    Args:
        seconds: how long.
        noise_every: as `Measure`.

    Attributes:
        pairs: what a step of two such blocks took, without and with: until its batch was there, as
            a whole, and of the processors, in seconds. `[pairs, 2, 3]`
    """

    _around_steps = staticmethod(FitClock._around_steps)

    def __init__(self, seconds: float, noise_every: int | None):
        super().__init__(verbose=0, noise_every=noise_every)
        self._seconds = seconds
        self.pairs: list[tuple[list[float], list[float]]] = []

    def _turn(self, is_on: bool) -> None:
        """Keras calls what it would call with `Measure`, or without."""
        told = Measure if is_on else keras.callbacks.Callback
        vars(self)["on_train_batch_begin"] = told.on_train_batch_begin.__get__(self)
        if self._noise is not None and not is_on:
            self._noise.stop()

    def steps(self, clock: FitClock, steps: Iterator[tuple]) -> Iterator[tuple]:
        """The steps of an epoch, in the place of those of `clock`, all of which are measured."""
        arrival = self.model.layers[0]
        measured, until_s = self._around_steps(clock, steps), time.monotonic() + self._seconds
        draw = random.Random(0)
        while time.monotonic() < until_s:
            took = {}
            for is_on in draw.sample([False, True], 2):
                given = measured if is_on else steps
                self._turn(is_on)
                yield next(given)
                before_s = []
                began = time.perf_counter(), time.process_time()
                for _ in range(BLOCK):
                    asked_s = time.time()
                    yield next(given)
                    before_s.append(arrival.at_s - asked_s)
                ended = time.perf_counter(), time.process_time()
                sums = [b - a for a, b in zip(began, ended, strict=True)]
                took[is_on] = [min(before_s), *(each / BLOCK for each in sums)]
            self.pairs.append((took[False], took[True]))


def hodges_lehmann(differences: np.ndarray) -> Estimate:
    """Of `[pairs]` differences, with the interval that Wilcoxon's signed ranks give."""
    n = len(differences)
    means = np.sort(((differences[:, None] + differences) / 2)[np.triu_indices(n)])
    below = len(means) / 2 - NORMAL * (n * (n + 1) * (2 * n + 1) / 24) ** 0.5
    first = max(0, int(below))
    return Estimate(float(np.median(means)), float(means[first]), float(means[-1 - first]))


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training, each figure")
    parser.add_argument("--models", nargs="*", default=[], help="parts of names")
    args = parser.parse_args()
    open_cpus()
    for cost in measured(args.seconds, args.models):
        print(cost, flush=True)


if __name__ == "__main__":
    main()
