"""What saving every 100 steps costs a training of 10.5 million parameters, by who saves.

python benchmarks/backup.py [--rounds 5] [--folder /somewhere/on/a/disk]

One model, one process; in each round every contestant trains for as many steps, in an order that
rotates. Timed are 200 steps in whose middle two saves fall, so that what is written beside training
is paid within the time.
"""

import argparse
import collections
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1]))

import tfparallel

SAVE_FREQ = 100
FIRST, LAST = 50, 250  # the timed steps
WIDTHS = (2048, 2048, 2048, 10)  # on 1024 features: 10.5 M parameters, 84 MB with momentum
ROWS = 64


class CheckpointManager(keras.callbacks.Callback):
    """`tf.train.CheckpointManager` as its guide uses it, which saves on the training thread."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder

    def on_train_begin(self, logs=None):
        checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)
        self._manager = tf.train.CheckpointManager(checkpoint, self._folder, max_to_keep=2)

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % SAVE_FREQ == 0:
            self._manager.save()


class Clock(keras.callbacks.Callback):
    """When each step ended; the last callback of the list."""

    def __init__(self):
        super().__init__()
        self.wall: list[float] = []
        self.processor: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())


CONTESTANTS = {
    "none": lambda folder: [],
    "tfparallel": lambda folder: [
        tfparallel.callbacks.BackupAndRestore(folder, save_freq=SAVE_FREQ)
    ],
    "tfparallel, asynchronous=False": lambda folder: [
        tfparallel.callbacks.BackupAndRestore(folder, save_freq=SAVE_FREQ, asynchronous=False)
    ],
    "keras.callbacks.BackupAndRestore": lambda folder: [
        keras.callbacks.BackupAndRestore(folder, save_freq=SAVE_FREQ)
    ],
    "tf.train.CheckpointManager": lambda folder: [CheckpointManager(folder)],
}


def make_model() -> keras.Model:
    """The MLP, built and compiled."""
    layers = [keras.layers.Dense(width, activation="relu") for width in WIDTHS]
    model = keras.Sequential([keras.Input((1024,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.001, momentum=0.9), loss)
    return model


def time_steps(model: keras.Model, callbacks: list) -> tuple[float, float, float]:
    """Seconds of a timed step with what callbacks did until the next: mean, longest, processor.

    The last is what a step used of all processors on average, in all threads.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 1024)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, rng.integers(0, 10, ROWS))).repeat()
    clock = Clock()
    model.fit(
        data, steps_per_epoch=LAST + 1, shuffle=False, verbose=0, callbacks=[*callbacks, clock]
    )
    steps = [end - start for start, end in itertools.pairwise(clock.wall[FIRST : LAST + 1])]
    processor = (clock.processor[LAST] - clock.processor[FIRST]) / len(steps)
    return statistics.fmean(steps), max(steps), processor


def main() -> None:
    """Prints the step time of each contestant, and its ratio to training without saving."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where backups go; default: the folder for temporaries")
    arguments = parser.parse_args()
    model = make_model()
    time_steps(model, [])
    results: dict[str, list[tuple]] = collections.defaultdict(list)
    names = collections.deque(CONTESTANTS)
    for _ in range(arguments.rounds):
        for name in names:
            folder = Path(tempfile.mkdtemp(dir=arguments.folder))
            results[name].append(time_steps(model, CONTESTANTS[name](folder / "backups")))
            shutil.rmtree(folder)
        names.rotate(1)
    print(
        "medians over rounds                step, ms  longest  processor  overhead: wall, processor"
    )
    for name, measured in results.items():
        mean, longest, processor = np.median(measured, axis=0) * 1e3
        wall_ratio, _, processor_ratio = np.median(np.divide(measured, results["none"]), axis=0)
        print(
            f"{name:35s} {mean:7.1f} {longest:8.0f} {processor:10.1f}"
            f" {wall_ratio - 1:15.1%} {processor_ratio - 1:10.1%}"
        )


if __name__ == "__main__":
    main()
