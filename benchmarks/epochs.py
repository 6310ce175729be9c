"""How long an epoch waits before its first step: under a strategy of ours, and in plain Keras.

    python benchmarks/epochs.py
    python benchmarks/epochs.py --epochs 12 --steps 24 --rounds 5

An MLP trains for some epochs, by turns with `OneDeviceStrategy` and without, in one process. Prints
of each the median over rounds of the seconds of `fit`, and of those that pass, in all its epochs
but the first, from their beginning to the beginning of their first step; then the ratio of `fit`.
"""

import argparse
import contextlib
import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tfparallel

WIDTH, ROWS = 512, 512


class Waits(keras.callbacks.Callback):
    """Adds up what epochs wait before their first step."""

    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._began_s = time.perf_counter()
        self._counts = epoch > 0

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if batch == 0 and self._counts:
            self.seconds += time.perf_counter() - self._began_s


def fit(strategy: tf.distribute.Strategy | None, epochs: int, steps: int) -> tuple[float, float]:
    """Seconds of a whole `fit`, and of those before first steps."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(steps * ROWS, WIDTH)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(ROWS)
    model.fit(dataset, verbose=0)  # traces
    waits, began_s = Waits(), time.perf_counter()
    model.fit(dataset, epochs=epochs, verbose=0, callbacks=[waits])
    return time.perf_counter() - began_s, waits.seconds


def main() -> None:
    """Prints a line for each, and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=24, help="of an epoch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    contestants = {"plain Keras": None, "OneDeviceStrategy": tfparallel.OneDeviceStrategy("CPU:0")}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, strategy in contestants.items():
            found[name].append(fit(strategy, options.epochs, options.steps))
    for name, times in found.items():
        whole_s, waited_s = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{name:18} fit {whole_s:6.2f} s, before first steps {waited_s:6.2f} s")
    first, second = (statistics.median(s for s, _ in times) for times in found.values())
    print(f"OneDeviceStrategy / plain Keras: {second / first:.2f}")


if __name__ == "__main__":
    main()
