"""Ranks that share all state beside a pipeline, or an axis of the model, in each: with backups.

`horovodrun -np 2 python -m tests.horovod.shares FOLDER AXIS`: rank 1 of a job that finds FOLDER
empty kills itself in its fourth step; one that is started again compares what it ends with to one
device, in float64.
"""

import os
import sys
from pathlib import Path

import keras

from tests.helpers import assert_same_training, in_float64, open_logical_cpus, tiny_data, train
from tests.hybrid.matrix_of_shares import strategy_of
from tests.hybrid.models_of_matrix import plain
from tfparallel.callbacks import BackupAndRestore

STEPS, KILLED_IN = 6, 4  # of all epochs; counted from one


class Watching(keras.callbacks.Callback):
    """Counts the steps of this process; kills it in one."""

    def __init__(self, kill_in: int | None):
        super().__init__()
        self.steps, self._kill_in = 0, kill_in

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        if self.steps == self._kill_in:
            os.kill(os.getpid(), 9)


def main(folder: Path, axis: str) -> None:
    is_first_job = not (folder / "backups").exists()
    options = {"build": plain, "data": tiny_data, "rows": 13, "batch_size": 5, "optimizer": _adam}
    open_logical_cpus(2)
    with in_float64():
        strategy = strategy_of({"shard": 2, axis: 2}, "plain", None, "parameters", "horovod")
        is_killed = is_first_job and strategy.rank == 1
        watching = Watching(KILLED_IN if is_killed else None)
        backups = BackupAndRestore(folder / "backups", save_freq=1, asynchronous=False)
        candidate = train(strategy, callbacks=[backups, watching], **options)
        keras.backend.clear_session()
        assert_same_training(train(None, **options), candidate, atol=1e-9)
    print("steps:", watching.steps, flush=True)


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
