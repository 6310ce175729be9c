"""A training with backups, as a job of fixed ranks or of ranks that come and go.

`horovodrun -np 2 python -m tests.horovod.resumable FOLDER KILL_AT [ADD_AT]`: rank 1 kills itself
after batch KILL_AT, once a job. With ADD_AT the job is elastic, and after that batch the rank that
is left adds one to FOLDER/hosts.
"""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfparallel
from tests.helpers import tiny_compile_options, tiny_data, tiny_model

BATCHES = 24
SAVE_FREQ = 4
ROWS = 4 * BATCHES - 1
_NEWS_TIMEOUT_S = 60.0


class Watching(keras.callbacks.Callback):
    """Notes batch, rank and number of ranks; kills and adds."""

    def __init__(self, strategy, job, folder, kill_at, add_at):
        super().__init__()
        self._strategy, self._job, self._folder = strategy, job, folder
        self._kill_at, self._add_at = kill_at, add_at
        self._log = (folder / f"batches-{os.getpid()}").open("a")

    def on_train_batch_end(self, batch, logs=None):
        rank, world_size = self._strategy.rank, self._strategy.world_size
        print(batch, rank, world_size, file=self._log, flush=True)
        killed = self._folder / "killed"
        if (rank, batch) == (1, self._kill_at) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), 9)
        if (world_size, batch) == (1, self._add_at):
            (self._folder / "hosts").write_text("localhost:2\n127.0.0.1:2\n")
            deadline = time.monotonic() + _NEWS_TIMEOUT_S
            while not self._job.has_news() and time.monotonic() < deadline:
                time.sleep(0.05)  # the launcher asks for hosts every second


def compiled_model():
    """The model of every run."""
    keras.utils.set_random_seed(1)
    model = tiny_model()
    model.compile(keras.optimizers.Adam(0.01), **tiny_compile_options())
    return model


def fit(model, callbacks=()):
    """Losses and weights of a training."""
    x, y = tiny_data(ROWS)
    history = model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=list(callbacks))
    return [np.asarray(history.history["loss"]), *model.get_weights()]


def train(job, folder, kill_at, add_at=None):
    """Trains; rank 0 writes losses and weights to FOLDER/results.npz."""
    strategy = tfparallel.HorovodStrategy(compression=None if job is None else "fp16")
    with strategy.scope():
        model = compiled_model()
    backup = tfparallel.callbacks.BackupAndRestore(folder / "backups", save_freq=SAVE_FREQ)
    callbacks = [backup, Watching(strategy, job, folder, kill_at, add_at)]
    if job is not None:
        callbacks.append(job.callback(check_freq=SAVE_FREQ))
    results = fit(model, callbacks)
    if strategy.rank == 0:
        np.savez(folder / "results.npz", *results)
    print("trained", strategy.world_size, flush=True)


def main(folder, kill_at, add_at=None):
    if add_at is None:
        train(None, Path(folder), int(kill_at))
    else:
        tfparallel.run_elastic(lambda job: train(job, Path(folder), int(kill_at), int(add_at)))()


if __name__ == "__main__":
    main(*sys.argv[1:])
