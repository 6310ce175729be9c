"""What measuring costs: trainings with and without `Measure`, one after the other, many times.

    python benchmarks/measure_cost.py --pairs 5 --models CNN

Squares of gradients are noted between two replicas, so `noise_every` is measured on two logical
CPUs. The figure is a median over steps, which does not see every twentieth one: a training that
notes squares in all of its steps, and one that does in the first alone, tell what a step costs that
notes them and what the others cost; `noise_every=20` is a twentieth of the one and the rest of the
other.
"""

import argparse
import contextlib
import dataclasses
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

EVERY = 20  # the noise_every of which the cost is told
PAIRS, STEPS, ROWS = 16, 40, 64
WIDTH = 1800  # 10 M parameters in three layers


@dataclass(frozen=True)
class Cost:
    """Of one model.

    Attributes:
        model: its name, and what is measured of it.
        step_ms: without measuring, median.
        share: of a step that measuring adds; median of pairs of pairs.
        spread: half of the distance between the quarters of the pairs.
        is_equal: whether weights are the same bits.
    """

    model: str
    step_ms: float
    share: float
    spread: float
    is_equal: bool

    def __str__(self) -> str:
        bits = "equal" if self.is_equal else "DIFFERENT"
        return (
            f"cost, {self.model}: {self.share:+.2%} (quarters +-{self.spread:.2%}) of a step of "
            f"{self.step_ms:.1f} ms; weights {bits}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def _mlp() -> tuple[keras.Model, np.ndarray]:
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
    return model, np.random.default_rng(0).normal(size=(STEPS * ROWS, WIDTH)).astype("float32")


def _cnn() -> tuple[keras.Model, np.ndarray]:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
        ]
    )
    rng = np.random.default_rng(0)
    return model, rng.normal(size=(STEPS * ROWS, 28, 28, 1)).astype("float32")


MODELS = {"MLP of 10 M parameters": _mlp, "small CNN": _cnn}


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
        costs.append(_cost(name, make, pairs))
        each = _cost(f"{name}, noise_every=1", make, pairs, noise_every=1)
        none = _cost(f"{name}, noise in the first step", make, pairs, noise_every=10**9)
        costs += [each, none, _sampled(f"{name}, noise_every={EVERY}", each, none)]
    return costs


def _sampled(name: str, each: Cost, none: Cost) -> Cost:
    """Every `EVERY`th step as `each`, the others as `none`."""
    share = each.share / EVERY + none.share * (1 - 1 / EVERY)
    spread = max(each.spread / EVERY, none.spread)
    return Cost(name, none.step_ms, share, spread, each.is_equal and none.is_equal)


def _cost(name: str, make: Any, pairs: int, noise_every: int | None = None) -> Cost:
    import tfparallel
    from tfparallel.callbacks import Measure

    trained = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        scope: Any = contextlib.nullcontext()
        if noise_every is not None:
            scope = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
        with scope:
            model, x = make()
            model.compile("sgd", "mse")
        trained.append(model)
    y = np.zeros((len(x), 1), "float32")
    seconds: list[tuple[float, float]] = []
    for turn in range(-2, 2 * ((pairs + 1) // 2)):  # the first two trace
        own = [0.0, 0.0]
        for i in (0, 1) if turn % 4 < 2 else (1, 0):
            clock = _StepClock()
            measure = Measure(verbose=0, noise_every=noise_every)
            data = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
            model = trained[(i + turn) % 2]  # of two, one may be faster: its weights lie elsewhere
            model.fit(x, y, callbacks=[clock, measure] if i else [clock], **data)
            if i and noise_every is not None and measure.total is not None:
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
