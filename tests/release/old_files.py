"""Writes the small files of this release that later releases have to load.

    python -m tests.release.old_files

makes `files/VERSION`, once for each release (BUILD.md, "Releasing"): after two epochs under a
strategy its backups, the model and the weights, and what is in them as plain arrays.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.helpers import open_logical_cpus

FILES = Path(__file__).parent / "files"
CPUS = ["CPU:0", "CPU:1"]
EPOCHS, EPOCHS_BEFORE = 4, 2

STRATEGIES: dict[str, Callable[[], tf.distribute.Strategy | None]] = {
    "none": lambda: None,
    "mirrored": lambda: tfparallel.MirroredStrategy(CPUS),
    "sharded": lambda: tfparallel.ShardedStrategy(CPUS),
    "pipeline": lambda: tfparallel.PipelineStrategy(CPUS, num_microbatches=2),
    "tensor_parallel": lambda: tfparallel.TensorParallelStrategy(_layout()),
}


def _layout() -> keras.distribution.LayoutMap:
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], ["cpu:0", "cpu:1"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*hidden/kernel"] = (None, "model")
    layout[".*hidden/bias"] = ("model",)
    return layout


def data() -> tuple[np.ndarray, np.ndarray]:
    """64 rows, `[64, 4]` and `[64, 2]`."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(64, 4)).astype("float32")
    return x, x @ rng.normal(size=(4, 2)).astype("float32")


def compiled_model(strategy: tf.distribute.Strategy | None) -> keras.Model:
    """A small model with statistics and slots, the same each time."""
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else tf.device("CPU:0"):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(6, "tanh", name="hidden"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(2, name="out"),
            ],
            name="model",
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def train(model: keras.Model, backups: Path, epochs: int) -> dict[str, list[float]]:
    """Goes on from what is in `backups`, which stay; the History."""
    backup = tfparallel.callbacks.BackupAndRestore(backups, keep=1, delete_on_success=False)
    x, y = data()
    return model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[backup]).history


def weights_of(model: keras.Model) -> dict[str, np.ndarray]:
    """By layer and name: a Sequential that was loaded leaves its own name out of paths."""
    return {weight.path.removeprefix("model/"): weight.numpy() for weight in model.weights}


def _write(folder: Path, strategy: tf.distribute.Strategy | None) -> None:
    folder.mkdir(parents=True)
    model = compiled_model(strategy)
    train(model, folder / "backups", EPOCHS_BEFORE)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    predicted = model.predict(data()[0][:8], verbose=0)
    np.savez(folder / "saved.npz", predicted=predicted, **weights_of(model))


def main() -> int:
    """Returns the exit status."""
    open_logical_cpus(4)
    release = FILES / tfparallel.__version__
    if release.exists():
        print(f"{release} exists: what a release wrote stays as it was.", file=sys.stderr)
        return 1
    for name, make in STRATEGIES.items():
        _write(release / name, make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
