"""One of two workers that do not do the same; how they differ is the first argument."""

import os
import sys
import time

import keras
import numpy as np

import tfparallel

difference = sys.argv[1]
strategy = tfparallel.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
features = np.ones((64, 6), "float32")
targets = np.ones((64, 4), "float32")


class ReportSteps(keras.callbacks.Callback):
    """Tells the test, through a file, that training goes on; slow enough to be killed in it."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        if rank == 0 and batch == 20:
            with open(sys.argv[2], "w") as file:
                file.write("training")


def batches(count: int):
    for _ in range(count):
        yield features[:8], targets[:8]


with strategy.scope():
    layers = [keras.Input((6,)), keras.layers.Dense(4)]
    if difference == "number of variables" and rank == 1:
        layers.append(keras.layers.Dense(4))
    if difference == "shape" and rank == 1:
        layers[1] = keras.layers.Dense(5)
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")

if difference == "number of batches" and rank == 1:
    model.fit(features[:32], targets[:32], batch_size=8, verbose=0)
elif difference == "length of generator":
    model.fit(batches(4 if rank else 500), verbose=0)
elif difference == "call" and rank == 1:
    model.evaluate(features, targets, verbose=0)
elif difference == "killed":
    model.fit(features, targets, batch_size=1, epochs=100, verbose=0, callbacks=[ReportSteps()])
else:
    model.fit(features, targets, batch_size=8, verbose=0)
os._exit(0)  # without the shutdown barrier, which waits for a peer that is gone
