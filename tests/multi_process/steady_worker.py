"""A worker that trains until it is told to end: `python steady_worker.py FILE [SILENT_S START_S]`.

FILE.RANK appears when this rank trains; a file FILE.WRONG_RANK holds what is wrong in its weights.
"""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfparallel
from tfparallel.coordination.timeouts import WorkerTimeouts

report, silent_s, start_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
strategy = tfparallel.MultiWorkerMirroredStrategy(
    timeouts=WorkerTimeouts(start_s=start_s, silent_s=silent_s)
)
rank = strategy.cluster_resolver.task_id


class Report(keras.callbacks.Callback):
    """Says that training goes on."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        if batch == 20:
            Path(f"{report}.{rank}").touch()


with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
x, y = np.ones((64, 6), "float32"), np.ones((64, 4), "float32")
epochs = int(os.environ.get("TEST_EPOCHS", "10000"))
model.fit(x, y, batch_size=1, epochs=epochs, verbose=0, callbacks=[Report()])
print("trained", flush=True)
