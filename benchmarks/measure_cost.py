"""What measuring costs: trainings with and without `Measure`, one after the other, many times."""

import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

PAIRS, STEPS, ROWS = 15, 40, 64
WIDTH = 1800  # 10 M parameters in three layers


@dataclass(frozen=True)
class Cost:
    """Of one model.

    Attributes:
        model: its name.
        step_ms: without measuring, median.
        share: of a step that measuring adds; median of pairs.
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


def measured() -> list[Cost]:
    """Of both models."""
    return [_cost("MLP of 10 M parameters", _mlp), _cost("small CNN", _cnn)]


def _cost(name: str, make: Any) -> Cost:
    from tfparallel.callbacks import Measure

    trained = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        model, x = make()
        model.compile("sgd", "mse")
        trained.append(model)
    y = np.zeros((len(x), 1), "float32")
    seconds: list[tuple[float, float]] = []
    for pair in range(PAIRS + 1):
        own = [0.0, 0.0]
        for i in (0, 1) if pair % 2 else (1, 0):
            clock = _StepClock()
            callbacks = [clock, Measure(verbose=0)] if i else [clock]
            data = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
            trained[i].fit(x, y, callbacks=callbacks, **data)
            own[i] = clock.step_s
        seconds.append((own[0], own[1]))
    pairs = seconds[1:]  # the first ones trace
    shares = [(b - a) / a for a, b in pairs]
    quarters = statistics.quantiles(shares, n=4)
    is_equal = all(
        np.array_equal(a, b)
        for a, b in zip(trained[0].get_weights(), trained[1].get_weights(), strict=True)
    )
    return Cost(
        name,
        statistics.median(a for a, _ in pairs) * 1e3,
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
