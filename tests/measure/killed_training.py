"""A training that backs up, measures and kills itself: `FOLDER BATCH SECONDS_A_BATCH`."""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

from tfparallel.callbacks import BackupAndRestore, Measure

folder, kill_at, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(pause_s)
        if batch == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class End(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        Path(folder, "ended").write_text(str(time.time()))


keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((40, 4), "float32")
backup = BackupAndRestore(folder + "/backup", save_freq=4, asynchronous=False)
measure = Measure(folder + "/measure", verbose=1)
model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[measure, End(), Kill(), backup])
