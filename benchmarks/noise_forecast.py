"""Whether the noise scale that `Measure` tells forecasts how many steps other batch sizes need.

    python benchmarks/noise_forecast.py --json forecast.json
    python benchmarks/noise_forecast.py --problems digits

Five problems, each with two losses L of the training rows that were fixed before their forecast:
digits of MNIST (the 5,000 of `requirements/digits.txt`), a student that learns a teacher's
regression, characters of the LICENSE, told from the eight before them, the miles per gallon of
cars, and clusters of ten classes (`noise_problems.py`). One batch size is trained by `fit` with
`Measure(noise_every=1)` on four replicas, five seeds. Its steps to L and the noise scale of each of
its epochs go into `measure.noise_scale.forecast_steps`, McCandlish's (arXiv 1812.06162): steps are
S_min (1 + noise scale / batch), summed over epochs, where S_min is what this one batch size needed.
Nothing is fitted to other batch sizes.

A training is at L where the median of the five seeds' losses has fallen to it for good: of the
curve that never rises and is nearest to it. At the best learning rates losses go up and down, and
the step at which one first happens to be below L is half luck, of which the theory, whose losses
are expected ones, knows nothing.

Then three other batch sizes are trained to L, on one device, each at the learning rate with the
fewest steps (as the paper does; so is the first one): of a grid of factors of the fourth root of 2,
five seeds each. And once more at the learning rate that goes with the forecast: that of
the measured batch size, divided by as many times as steps are more. Rows are drawn with
replacement, by numbers that follow from seed and step. SGD, no momentum, of which the paper's
equations are.
"""

import argparse
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import keras
import numpy as np
import tensorflow as tf
from noise_problems import PROBLEMS, Problem
from rich.console import Console
from rich.table import Table

REPLICAS = 4
SEEDS = 5
EVERY = 5  # steps between two looks at the loss; an epoch
LOOKED_AT = 2000  # rows of which the loss is
GRID = 2 ** (1 / 4)
AROUND = 3  # learning rates on each side of the best one
MOST = 1000  # steps that a training may need, or some times that
PATIENCE = 3  # times the steps expected, after which it is given up
BEYOND = 1.5  # times the steps to L that trainings go on for, to see whether the loss rises again
WITHIN = 0.15


def losses(kind: str, y: tf.Tensor, told: tf.Tensor) -> tf.Tensor:
    """Of each row."""
    if kind == "square":
        return tf.reduce_sum(tf.square(told - y), -1)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=told)


def drawn(seed: tf.Tensor, step: tf.Tensor, batch_size: int, rows: int) -> tf.Tensor:
    """The rows of a batch, with replacement: the same ones for `fit` and for a loop."""
    seeds = tf.stack([tf.cast(seed, tf.int64), tf.cast(step, tf.int64)])
    return tf.random.stateless_uniform([batch_size], seeds, 0, rows, tf.int32)


class Loops:
    """Trainings of one problem on one device, each a call of a graph."""

    def __init__(self, problem: Problem):
        self.problem = problem
        x, y = problem.data()
        self.x, self.y = tf.constant(x), tf.constant(y)
        self.model = problem.build()
        self._graphs: dict[int, Any] = {}
        self._first: list[list[np.ndarray]] = []
        for seed in range(SEEDS):
            keras.utils.set_random_seed(seed)
            self._first.append(problem.build().get_weights())

    def first_weights(self, seed: int) -> list[np.ndarray]:
        """That a training begins with."""
        return self._first[seed]

    @tf.function
    def loss(self) -> tf.Tensor:
        """Of some rows, as the model is."""
        y, told = self.y[:LOOKED_AT], self.model(self.x[:LOOKED_AT])
        return tf.reduce_mean(losses(self.problem.loss, y, told))

    def steps(self, batch_size: int, rate: float, limit: float) -> float:
        """To L; infinite if more than `limit` are needed."""
        if batch_size not in self._graphs:
            self._graphs[batch_size] = self._graph(batch_size)
        looks, curves = tf.constant(math.ceil(BEYOND * limit / EVERY)), []
        for seed in range(SEEDS):
            self.model.set_weights(self._first[seed])
            curve = self._graphs[batch_size](tf.constant(rate), tf.constant(seed), looks)
            curves.append(curve.numpy())
        steps = crossing(curves, self.problem.until)
        return steps if steps <= limit else math.inf

    def _graph(self, batch_size: int) -> Any:
        x, y, model, problem = self.x, self.y, self.model, self.problem
        weights = [each.value for each in model.trainable_variables]

        def one(rate: tf.Tensor, seed: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
            rows = drawn(seed, step, batch_size, len(x))
            batch, targets = tf.gather(x, rows), tf.gather(y, rows)
            with tf.GradientTape() as tape:
                told = model(batch, training=True)
                loss = tf.reduce_mean(losses(problem.loss, targets, told))
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(rate * tf.convert_to_tensor(gradient))
            return step + 1

        @tf.function
        def run(rate: tf.Tensor, seed: tf.Tensor, looks: tf.Tensor) -> tf.Tensor:
            step, seen = tf.constant(0), tf.TensorArray(tf.float32, looks + 1)
            seen = seen.write(0, self.loss())
            for look in tf.range(looks):
                for _ in tf.range(EVERY):
                    step = one(rate, seed, step)
                seen = seen.write(look + 1, self.loss())
            return seen.stack()

        return run


def crossing(curves: Sequence[Sequence[float]], until: float) -> float:
    """The step at which the loss was `until`: the median of the seeds, where it falls for good.

    Args:
        curves: of each seed, the loss after each `EVERY` steps.

    Returns:
        Infinity if it never was.
    """
    curve = falling(np.median(np.nan_to_num(curves, nan=np.inf), 0).tolist())
    there = next((look for look, loss in enumerate(curve) if loss <= until), 0)
    if not there:
        return math.inf
    before, loss = curve[there - 1], curve[there]
    return EVERY * (there - (until - loss) / (before - loss))


def falling(curve: Sequence[float]) -> list[float]:
    """The curve nearest to `curve`, in squares, that never rises.

    Neighbours that rise get their mean.

    Source: isotonic regression by pooling adjacent violators, Ayer et al., 1955.
    """
    pools: list[tuple[float, int]] = []  # means, and of how many
    for value in curve:
        pool = value, 1
        while pools and pools[-1][0] <= pool[0]:
            (mean, number), (value, more) = pools.pop(), pool
            pool = (mean * number + value * more) / (number + more), number + more
        pools.append(pool)
    return [mean for mean, number in pools for _ in range(number)]


class Rates:
    """The learning rates of one batch size, and how many steps to L they need."""

    def __init__(self, loops: Loops, batch_size: int, most: float):
        self._loops, self._batch_size = loops, batch_size
        self._fewest = most  # steps, more of which are not looked at
        self.steps_at = functools.cache(self._steps_at)

    def _steps_at(self, exponent: int) -> float:
        rate = self._loops.problem.rate * GRID**exponent
        steps = self._loops.steps(self._batch_size, rate, self._fewest)
        self._fewest = min(self._fewest, steps)
        return steps

    def best(self, start: int) -> int:
        """The exponent with the fewest steps, of which `AROUND` on each side have been tried."""
        low = high = start
        while True:
            best = min(range(low, high + 1), key=self.steps_at)
            if high - best < AROUND and math.isfinite(self.steps_at(best)):
                high += 1
            elif best - low < AROUND:
                low -= 1
            else:
                return best


@dataclass(frozen=True)
class Measured:
    """What `Measure` has told of trainings to L, one of each seed.

    Attributes:
        steps: to L.
        squares, variances: |G|^2 and S of each epoch, means of the trainings.
    """

    steps: float
    squares: list[float]
    variances: list[float]

    @property
    def scales(self) -> list[float]:
        """The noise scale of each epoch, in rows."""
        from tfparallel.measure.noise_scale import Estimate, noise_rows

        pairs = zip(self.squares, self.variances, strict=True)
        return [noise_rows(Estimate(*each)) for each in pairs]

    def forecast(self, batch_size: int, other_size: int) -> float:
        """Steps to L with batches of `other_size`."""
        from tfparallel.measure.noise_scale import forecast_steps

        done = range(0, math.ceil(self.steps), EVERY)
        lengths = [min(EVERY, self.steps - each) for each in done]
        return forecast_steps(zip(lengths, self.scales, strict=False), batch_size, other_size)


def measured(loops: Loops, rate: float, steps: float) -> Measured:
    """Trainings by `fit` under `MirroredStrategy`, with `Measure`, of all seeds."""
    looks = math.ceil(BEYOND * steps / EVERY)
    runs = [_fit(loops, rate, seed, looks) for seed in range(SEEDS)]
    squares, variances = np.mean([noise for _, noise in runs], 0).T.tolist()
    return Measured(crossing([curve for curve, _ in runs], loops.problem.until), squares, variances)


def _fit(
    loops: Loops, rate: float, seed: int, looks: int
) -> tuple[list[float], list[tuple[float, float]]]:
    """The loss at first and after each epoch, and of each epoch |G|^2 and S."""
    import tfparallel

    problem, x, y = loops.problem, loops.x, loops.y
    with tfparallel.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)]).scope():
        model = problem.build()
        classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        loss = "mse" if problem.loss == "square" else classes  # `losses`, by Keras
        model.compile(keras.optimizers.SGD(rate), loss)
    model.set_weights(loops.first_weights(seed))
    curve: list[float] = []

    def batch(step: tf.Tensor) -> tuple:
        rows = drawn(tf.constant(seed), step, problem.batch_size, len(x))
        return tf.gather(x, rows), tf.gather(y, rows)

    def look(*_: object) -> None:
        loops.model.set_weights(model.get_weights())
        curve.append(float(loops.loss()))

    look()
    measure = tfparallel.callbacks.Measure(verbose=0, noise_every=1)
    looking = keras.callbacks.LambdaCallback(on_epoch_end=look)
    data = tf.data.Dataset.counter().map(batch)
    fit = {"steps_per_epoch": EVERY, "epochs": looks, "verbose": 0}
    model.fit(data, callbacks=[measure, looking], **fit)
    noise = [each.details["noise"] for each in measure.records]
    return curve, [(each["squared_gradient"], each["variance"]) for each in noise]


def row(name: str) -> list[dict[str, Any]]:
    """The forecasts of one problem, each beside what training needed."""
    problem = PROBLEMS[name]
    loops = Loops(problem)
    own = Rates(loops, problem.batch_size, MOST)
    exponent = own.best(0)
    rate = problem.rate * GRID**exponent
    looked = measured(loops, rate, own.steps_at(exponent))
    steps = looked.steps
    scales = looked.scales
    print(
        f"{name}: {problem.batch_size} rows, learning rate {rate:.3g}, {steps:.0f} steps to "
        f"{problem.until} (by the loop {own.steps_at(exponent):.0f}); noise scale "
        f"{statistics.median(scales[: len(scales) // 4]):.0f} in the first quarter, "
        f"{statistics.median(scales[-len(scales) // 4 :]):.0f} in the last",
        flush=True,
    )
    forecasts = {b: looked.forecast(problem.batch_size, b) for b in problem.others}  # before
    found = []
    for batch_size in problem.others:
        rates = Rates(loops, batch_size, PATIENCE * forecasts[batch_size])
        nearest = exponent + round(math.log(batch_size / problem.batch_size, GRID) / 2)
        best = rates.best(nearest)
        needed = rates.steps_at(best)
        told_rate = rate * steps / forecasts[batch_size]
        at_told = loops.steps(batch_size, told_rate, PATIENCE * needed)
        found.append(
            {
                "problem": name,
                "until": problem.until,
                "measured_at": problem.batch_size,
                "steps": steps,
                "batch_size": batch_size,
                "rate": problem.rate * GRID**best,
                "forecast": forecasts[batch_size],
                "needed": needed,
                "off": forecasts[batch_size] / needed - 1,
                "told_rate": told_rate,
                "needed_at_told": at_told,
                "off_at_told": forecasts[batch_size] / at_told - 1,
                "scales": scales,
                "squares": looked.squares,
                "variances": looked.variances,
            }
        )
        print(_line(found[-1]), flush=True)
    return found


def _line(each: dict[str, Any]) -> str:
    return (
        f"  {each['batch_size']} rows: {each['forecast']:.0f} steps forecast, {each['needed']:.0f} "
        f"needed (learning rate {each['rate']:.3g}), {each['off']:+.1%}; "
        f"{each['needed_at_told']:.0f} at {each['told_rate']:.3g}, {each['off_at_told']:+.1%}"
    )


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Of all problems."""
    best, told = (sum(abs(each[off]) <= WITHIN for each in rows) for off in ("off", "off_at_told"))
    title = f"within {WITHIN:.0%}: {best} of {len(rows)} at the best learning rate, {told} as told"
    made = Table(title=title)
    for name in ("problem", "L", "steps", "batch", "forecast", "best", "off", "as told", "off"):
        made.add_column(name, justify="left" if name == "problem" else "right")
    for each in rows:
        made.add_row(
            each["problem"],
            f"{each['until']}",
            f"{each['steps']:.0f}",
            f"{each['batch_size']}",
            f"{each['forecast']:.0f}",
            f"{each['needed']:.0f}",
            f"{each['off']:+.1%}",
            f"{each['needed_at_told']:.0f}",
            f"{each['off_at_told']:+.1%}",
        )
    return made


def main() -> None:
    """Forecasts, trains, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--json", type=Path, help="where results are written")
    args = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    tf.config.set_logical_device_configuration(cpu, logical)
    began_s, rows = time.monotonic(), []
    for name in args.problems:
        rows += row(name)
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1))
    Console(width=None if Console().is_terminal else 100).print(table(rows))
    print(f"{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
