"""What saving every 100 steps costs a training of 10.5 million parameters, by who saves.

python benchmarks/backup.py [--rounds 5] [--rows 64] [--folder /on/a/disk] [--only NAME ...]

One model, one process; in each round every contestant trains for as many steps, in an order that
rotates. Timed are 200 steps in whose middle two saves fall, so that what is written beside training
is paid within the time.

Other programs on the machine disturb single steps, each round others; saves fall on the same steps
of every round. So the time of a step is the median over rounds of that step's times, and their mean
is what training takes. Besides, processor time is counted: of the training thread (what a save
holds it up for, without waiting) and of all threads.
"""

import argparse
import collections
import itertools
import os
import shutil
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
        self.thread: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())
        self.thread.append(time.thread_time())


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


def time_steps(model: keras.Model, callbacks: list, rows: int) -> tuple[list[float], float, float]:
    """Seconds of each timed step with what callbacks did until the next.

    Returns:
        Also means of the processor time of all threads and of this one.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 1024)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, rng.integers(0, 10, rows))).repeat()
    clock = Clock()
    model.fit(
        data, steps_per_epoch=LAST + 1, shuffle=False, verbose=0, callbacks=[*callbacks, clock]
    )
    steps = [end - start for start, end in itertools.pairwise(clock.wall[FIRST : LAST + 1])]
    processor = (clock.processor[LAST] - clock.processor[FIRST]) / len(steps)
    thread = (clock.thread[LAST] - clock.thread[FIRST]) / len(steps)
    return steps, processor, thread


def main() -> None:
    """Prints the step time of each contestant, and its ratio to training without saving."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where backups go; default: the folder for temporaries")
    parser.add_argument("--rows", type=int, default=64, help="of a batch")
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, default=list(CONTESTANTS))
    arguments = parser.parse_args()
    model = make_model()
    time_steps(model, [], arguments.rows)
    results: dict[str, list[tuple]] = collections.defaultdict(list)
    names = collections.deque(dict.fromkeys(["none", *arguments.only]))
    print(f"load before: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    for _ in range(arguments.rounds):
        for name in names:
            folder = Path(tempfile.mkdtemp(dir=arguments.folder))
            callbacks = CONTESTANTS[name](folder / "backups")
            results[name].append(time_steps(model, callbacks, arguments.rows))
            shutil.rmtree(folder)
        names.rotate(1)
    print(f"load after: {os.getloadavg()[0]:.1f}; medians over {arguments.rounds} rounds")
    print(f"{'':35s}       ms of a step, and of processors     |  more than none, of a step")
    print(f"{'':35s}    mean longest     all  thread |    mean     all  thread")
    base = _summary(results["none"])
    for name, measured in results.items():
        mean, longest, processor, thread = _summary(measured)
        # What the training thread does more, it does while the step waits: of the step's seconds.
        wall, all_threads, own = mean - base[0], processor - base[2], thread - base[3]
        print(
            f"{name:35s} {mean:7.1f} {longest:7.0f} {processor:7.1f} {thread:7.2f} |"
            f" {wall / base[0]:7.1%} {all_threads / base[2]:7.1%} {own / base[0]:7.1%}"
        )


def _summary(rounds: list[tuple]) -> tuple[float, ...]:
    """Milliseconds: mean and longest of the steps, and processor times of a step."""
    steps = np.median([steps for steps, _, _ in rounds], axis=0)
    processor, thread = np.median([times for _, *times in rounds], axis=0)
    return steps.mean() * 1e3, steps.max() * 1e3, processor * 1e3, thread * 1e3


if __name__ == "__main__":
    main()
