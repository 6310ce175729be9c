"""A training on the cores of two hosts that saves backups, is killed, and goes on.

    python -m tests.tpu.killed_pod CASE FOLDER      kills itself in the second epoch
    python -m tests.tpu.killed_pod CASE FOLDER      goes on; prints a line of JSON

That is the steps that were left, and the largest differences to one device that nobody killed.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import tfparallel
from tests.helpers import SEED, in_float64, momentum_sgd, train
from tests.tpu import two_hosts


class KilledInSecondEpoch(keras.callbacks.Callback):
    """Ends the process as a machine does that is taken away."""

    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.epoch == 1 and batch == 2:  # that of batch 0 is written
            os.kill(os.getpid(), signal.SIGKILL)


class CountsSteps(keras.callbacks.Callback):
    num_steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1


def training(scope, case: str, callbacks: list) -> dict[str, np.ndarray]:
    keras.utils.set_random_seed(SEED)  # before the data, whose shuffle has it, too
    given = getattr(two_hosts, case)(17)
    options = {"build": two_hosts.model, "optimizer": momentum_sgd, "data": None, **given}
    return train(scope, callbacks=callbacks, **options).results()


def main(case: str, folder: Path) -> dict:
    is_killed, steps = not folder.exists(), CountsSteps()
    strategy = two_hosts.connect()
    backup = tfparallel.callbacks.BackupAndRestore(folder, save_freq=1)
    with in_float64():
        last = KilledInSecondEpoch() if is_killed else steps
        ours = training(strategy, case, [backup, last])
        reference = training(None, case, [])
    differences = {
        name: float(np.max(np.abs(ours[name] - value))) for name, value in reference.items()
    }
    return {"steps": steps.num_steps, "differences": differences}


if __name__ == "__main__":
    print("RESULT", json.dumps(main(sys.argv[1], Path(sys.argv[2]))), flush=True)
