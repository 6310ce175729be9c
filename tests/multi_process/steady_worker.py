"""A worker that trains until it is told to end: `python steady_worker.py FILE SILENT_S START_S`.

FILE.RANK appears when this rank trains. TEST_STRATEGY says how it is made, and TEST_STAYS_AWAY
which rank stops training without ending, in a step that the others are in.
"""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.coordination.timeouts import WorkerTimeouts

report, silent_s, start_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
stall_s = float(os.environ.get("TEST_STALL_S", "1800"))
timeouts = WorkerTimeouts(start_s=start_s, silent_s=silent_s, stall_s=stall_s)
Options = tf.distribute.experimental.CommunicationOptions
STRATEGIES = {
    "workers": lambda: tfparallel.MultiWorkerMirroredStrategy(timeouts=timeouts),
    "collectives": lambda: tfparallel.MultiWorkerMirroredStrategy(
        communication_options=Options(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        ),
        timeouts=timeouts,
    ),
    "sharded": lambda: tfparallel.ShardedStrategy(min_size=1, timeouts=timeouts),
    "sharded collectives": lambda: tfparallel.ShardedStrategy(
        min_size=1, transport="collectives", timeouts=timeouts
    ),
    "copies": lambda: tfparallel.ShardedStrategy(min_size=1, replicas=2, timeouts=timeouts),
    "copies collectives": lambda: tfparallel.ShardedStrategy(
        min_size=1, replicas=2, transport="collectives", timeouts=timeouts
    ),
}
strategy = STRATEGIES[os.environ.get("TEST_STRATEGY", "workers")]()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
stays_away = os.environ.get("TEST_STAYS_AWAY") == str(rank)


class Report(keras.callbacks.Callback):
    """Says that training goes on."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        if batch == 20:
            Path(f"{report}.{rank}").touch()
            if stays_away:
                time.sleep(600)


with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
x, y = np.ones((64, 6), "float32"), np.ones((64, 4), "float32")
epochs = int(os.environ.get("TEST_EPOCHS", "10000"))
model.fit(x, y, batch_size=1, epochs=epochs, verbose=0, callbacks=[Report()])
print("trained", flush=True)
