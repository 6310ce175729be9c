"""Trains a model as one of several workers; tells how many bytes a ring was given in a step.

Also where its part of the first weight is, and that of the optimizer's slot for it.

For a request, `{"options": of ShardedStrategy}`, this trains. One for each process: a second
strategy would take the keys of the first one's collectives.
"""

import os
import statistics

import keras
import numpy as np

import tfparallel
from tests.multi_process.answering import answer_requests
from tfparallel.communication.alpha_beta import SMALL_BYTES
from tfparallel.logical_devices import open_logical_cpus

WIDTH, NUM_LAYERS, STEPS = 128, 6, 3


def train(options: dict) -> dict:
    if "STARTS_HOROVOD" in os.environ:
        import horovod.tensorflow as hvd

        hvd.init()
    open_logical_cpus()  # a fork of a process that had read another environment
    strategy = tfparallel.ShardedStrategy(**options)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(NUM_LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    rows = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")
    rings, sent = _rings(strategy.extended), []
    for ring in rings:  # two workers measure what is small: fewer messages of more bytes
        ring.small_bytes = SMALL_BYTES
    for _ in range(STEPS):
        before = [ring.bytes_sent for ring in rings]
        model.train_on_batch(rows, rows)
        sent.append([ring.bytes_sent - b for ring, b in zip(rings, before, strict=True)])
    return {
        "sent": [statistics.median(own) for own in zip(*sent, strict=True)],
        "places": [v.value.values[-1].device[-5:] for v in _first_weight_and_slot(model)],
        "weights": sum(weight.numpy().nbytes for weight in model.trainable_variables),
    }


def _first_weight_and_slot(model: keras.Model) -> list:
    return [model.trainable_variables[0], model.optimizer._momentums[0]]


def _rings(extended) -> list:
    """The ring of all workers, and where there are several copies that of a copy and the other."""
    own = [extended._ring_all_reduce]
    if extended._across is not None:
        own += [extended._in_copy._reduction, extended._across._reduction]
    return [each._ring for each in own]


if __name__ == "__main__":
    answer_requests(train, lambda: None)
