"""What measuring costs a step.

    python benchmarks/measure_cost.py --pairs 5 --models CNN

In one training, `Measure` is there in twelve steps and away in the next twelve: blocks that follow
each other are compared, so that what the machine does else cancels out; the first two steps of a
block are left out. Weights are compared with those of a training without. Where others use the
machine, such pairs scatter by more than the cost: so what Python does around a step, most of the
cost, is timed by itself as well, where it runs.

Steps that note squares of gradients for the noise scale are functions of their own, so trainings
with and without it are compared, one after the other, of two replicas on two logical CPUs. The
figure is a median over steps, which does not see every hundredth one: a training that notes squares
in all of its steps, and one that does in the first alone, tell what a step costs that notes them
and what the others cost; `noise_every=100` is a hundredth of the one and the rest of the other.
"""

import argparse
import dataclasses
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import keras
import numpy as np
import tensorflow as tf

EVERY = 100  # the noise_every of which the cost is told
PAIRS, STEPS, BLOCK = 16, 48, 12
WIDTH = 1800  # 10 M parameters in three layers


class Problem(NamedTuple):
    """A model that is not compiled, rows for `STEPS` steps, and how many rows a step has."""

    model: keras.Model
    x: np.ndarray
    batch_size: int


@dataclass(frozen=True)
class Cost:
    """Of one model.

    Attributes:
        model: its name, and what is measured of it.
        step_ms: without measuring, median.
        share: of a step that measuring adds; median of pairs of pairs.
        spread: half of the distance between the quarters of the pairs.
        is_equal: whether weights are the same bits.
        python_us: what Python does for it around a step, median; None where that is not known.
    """

    model: str
    step_ms: float
    share: float
    spread: float
    is_equal: bool
    python_us: float | None = None

    def __str__(self) -> str:
        bits = "equal" if self.is_equal else "DIFFERENT"
        added = f"{self.share * self.step_ms * 1e3:+.0f} us"
        if self.python_us is not None:
            added += f", Python's part {self.python_us:.0f} us"
        return (
            f"cost, {self.model}: {self.share:+.2%} (quarters +-{self.spread:.2%}) of a step of "
            f"{self.step_ms:.1f} ms, {added}; weights {bits}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def _mlp() -> Problem:
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
    return Problem(model, _normal(STEPS * 64, WIDTH), 64)


def _convnet() -> Problem:
    """Of keras.io's "Simple MNIST convnet", and its batches."""
    return Problem(_of_convolutions(32, 64), _normal(STEPS * 128, 28, 28, 1), 128)


def _least() -> Problem:
    """So small that a step is little more than its operations' overhead."""
    return Problem(_of_convolutions(16, 32), _normal(STEPS * 32, 12, 12, 1), 32)


def _of_convolutions(*filters: int) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential()
    for each in filters:
        model.add(layers.Conv2D(each, 3, activation="relu"))
        model.add(layers.MaxPooling2D())
    for layer in (layers.Flatten(), layers.Dropout(0.5), layers.Dense(1)):
        model.add(layer)
    return model


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


MODELS = {"MLP of 10 M parameters": _mlp, "MNIST convnet": _convnet, "CNN of 12 x 12": _least}


def open_cpus() -> None:
    """Two, before TensorFlow starts."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, logical)


def measured(pairs: int = PAIRS, words: Sequence[str] = ()) -> list[Cost]:
    """Of the models whose names hold one of `words`, or of all; `open_cpus` comes first."""
    costs = []
    for name, make in MODELS.items():
        if words and not any(each in name for each in words):
            continue
        costs.append(_always_on(name, make, pairs))
        each = _with_noise(f"{name}, noise_every=1", make, pairs, noise_every=1)
        none = _with_noise(f"{name}, noise in the first step", make, pairs, noise_every=10**9)
        costs += [each, none, _sampled(f"{name}, noise_every={EVERY}", each, none)]
    return costs


def _always_on(name: str, make: Callable[[], Problem], pairs: int) -> Cost:
    from tfparallel.callbacks import Measure
    from tfparallel.callbacks.fit_clock import FitClock

    turns = _Turns(FitClock._around_steps)
    weights = []
    for callbacks in ([], [Measure(verbose=0)]):
        keras.utils.set_random_seed(0)
        model, x, batch_size = make()
        model(x[:1])
        model.compile("sgd", "mse")
        y = np.zeros((len(x), 1), "float32")
        with mock.patch.object(FitClock, "_around_steps", lambda *args: turns.steps(*args)):
            data = {"batch_size": batch_size, "epochs": 1 + 2 * pairs, "verbose": 0}
            model.fit(x, y, callbacks=callbacks, **data)
        weights.append(model.get_weights())
    shares = [on / off - 1 for on, off in turns.blocks]
    quarters = statistics.quantiles(shares, n=4)
    return Cost(
        name,
        statistics.median(off for _, off in turns.blocks) * 1e3,
        statistics.median(shares),
        (quarters[2] - quarters[0]) / 2,
        all(np.array_equal(one, other) for one, other in zip(*weights, strict=True)),
        statistics.median(turns.python_s) * 1e6,
    )


class _Turns:
    """Measures the steps of every other block only.

    Args:
        measured: gives the steps of an epoch, each measured.

    Attributes:
        blocks: the median time of a step with and without, of blocks that follow each other.
        python_s: what measuring took between two steps, without Keras's part of it.
    """

    def __init__(self, measured: Callable[[Any, Iterator], Iterator]):
        self._measured, self._num_epochs = measured, 0
        self.blocks: list[tuple[float, float]] = []
        self.python_s: list[float] = []

    def steps(self, clock: Any, steps: Iterator) -> Iterator:
        """In the place of `measured`; the first epoch, which traces, is measured whole."""
        timed = _TimedSteps(steps)
        measured = self._measured(clock, timed)
        first_is_on, self._num_epochs = self._num_epochs % 2, self._num_epochs + 1
        began = []
        for number in range(STEPS):
            began.append(time.perf_counter())
            is_on = self._num_epochs == 1 or number // BLOCK % 2 != first_is_on
            step = next(measured if is_on else timed)
            if is_on:
                self.python_s.append(time.perf_counter() - began[-1] - timed.last_s)
            yield step
        if self._num_epochs == 1:
            return
        times = [b - a for a, b in itertools.pairwise(began)]
        blocks = [statistics.median(times[i + 2 : i + BLOCK - 1]) for i in range(0, STEPS, BLOCK)]
        pairs = zip(blocks[::2], blocks[1::2], strict=True)
        self.blocks += [pair if first_is_on else pair[::-1] for pair in pairs]


class _TimedSteps(Iterator[tuple]):
    """The steps of an epoch.

    Attributes:
        last_s: what Keras took to give the last one.
    """

    def __init__(self, steps: Iterator[tuple]):
        self._steps = steps
        self.last_s = 0.0

    def __next__(self) -> tuple:
        asked = time.perf_counter()
        step = next(self._steps)
        self.last_s = time.perf_counter() - asked
        return step


def _sampled(name: str, each: Cost, none: Cost) -> Cost:
    """Every `EVERY`th step as `each`, the others as `none`."""
    share = each.share / EVERY + none.share * (1 - 1 / EVERY)
    spread = max(each.spread / EVERY, none.spread)
    return Cost(name, none.step_ms, share, spread, each.is_equal and none.is_equal)


def _with_noise(name: str, make: Callable[[], Problem], pairs: int, noise_every: int) -> Cost:
    import tfparallel
    from tfparallel.callbacks import Measure

    trained = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model, x, batch_size = make()
            model(x[:1])
            model.compile("sgd", "mse")
        trained.append(model)
    y = np.zeros((len(x), 1), "float32")
    seconds: list[tuple[float, float]] = []
    for turn in range(-2, 2 * ((pairs + 1) // 2)):  # the first two trace
        own = [0.0, 0.0]
        for i in (0, 1) if turn % 4 < 2 else (1, 0):
            clock = _StepClock()
            measure = Measure(verbose=0, noise_every=noise_every)
            data = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
            model = trained[(i + turn) % 2]  # of two, one may be faster: its weights lie elsewhere
            model.fit(x, y, callbacks=[clock, measure] if i else [clock], **data)
            if i and measure.total is not None:
                assert "noise" in measure.total.details  # so that there is something to pay for
            own[i] = clock.step_s
        if turn >= 0:
            seconds.append((own[0], own[1]))
    # Of two pairs in which the models have changed places, so that which one it was cancels out.
    shares = [
        math.sqrt(b / a * d / c) - 1
        for (a, b), (c, d) in zip(seconds[::2], seconds[1::2], strict=True)
    ]
    quarters = statistics.quantiles(shares, n=4)
    is_equal = all(
        np.array_equal(a, b)
        for a, b in zip(trained[0].get_weights(), trained[1].get_weights(), strict=True)
    )
    return Cost(
        name,
        statistics.median(a for a, _ in seconds) * 1e3,
        statistics.median(shares),
        (quarters[2] - quarters[0]) / 2,
        is_equal,
    )


class _StepClock(keras.callbacks.Callback):
    """The median time from one step's beginning to the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self._began: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began.append(time.perf_counter())

    @property
    def step_s(self) -> float:
        """Seconds."""
        return statistics.median(b - a for a, b in zip(self._began, self._began[1:], strict=False))


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of trainings with and without")
    parser.add_argument("--models", nargs="*", default=[], help="parts of names")
    args = parser.parse_args()
    open_cpus()
    for cost in measured(args.pairs, args.models):
        print(cost, flush=True)


if __name__ == "__main__":
    main()
