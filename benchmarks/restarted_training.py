"""A training that is delayed in twelve places and killed at a random moment.

    python restarted_training.py FOLDER SEED
    python restarted_training.py FOLDER SEED STEPS     # not delayed, and killed after so many steps

Each delay is written to FOLDER/delays.jsonl when it is over: its category, and from when to when.
"""

import json
import os
import random
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

from tfparallel.callbacks import BackupAndRestore, Measure
from tfparallel.measure.goodput import process_started_at

FOLDER, SEED = sys.argv[1], int(sys.argv[2])
LAST_STEP = int(sys.argv[3]) if len(sys.argv) > 3 else None
LOG = os.open(f"{FOLDER}/delays.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def note(category, began):
    """A span that is over, in one write."""
    line = {"category": category, "from": began, "to": time.time(), "run": SEED}
    os.write(LOG, json.dumps(line).encode() + b"\n")


def pause(seconds):
    """Sleeps, where the training is delayed."""
    time.sleep(seconds if LAST_STEP is None else 0.0)


def delay(category, seconds):
    """Sleeps: of validation and of restoring, which are noted as such, it is a part."""
    began, category = time.time(), WITHIN.get((category, where[-1]), category)
    pause(seconds)
    if category is not None:
        note(category, began)


where = ["start"]  # what tracing belongs to
# A step of validation sleeps as a step does. What restoring reads again is noted with it.
WITHIN = {("productive", "validation"): "validation", ("input", "restoring"): None}


def work(seconds):
    """Computes on this thread, as tracing does."""
    category = where[-1]
    began, until = time.time(), time.thread_time() + (seconds if LAST_STEP is None else 0.0)
    while time.thread_time() < until:
        pass
    if category != "start":  # which is noted as a whole
        note(category, began)


class Slow(keras.layers.Layer):
    """Takes its time when it is traced, and in each step's graph."""

    def call(self, inputs):
        work(0.8)  # 1

        @tf.custom_gradient
        def paused(x):
            def late(rows):
                delay("productive", 0.15)  # 2
                return rows

            return tf.ensure_shape(tf.numpy_function(late, [x], x.dtype), x.shape), lambda dy: dy

        return paused(inputs)


def slow_rows(category, seconds):
    """A pipeline that sleeps for each batch."""

    def late(rows):
        delay(category, seconds)
        return rows

    def paused(rows):
        rows = tf.ensure_shape(tf.numpy_function(late, [rows], tf.float32), rows.shape)
        return rows, rows[:, :1]

    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False  # letting such an iterator go takes TensorFlow half a second
    rows = tf.data.Dataset.from_tensor_slices(np.ones((8, 2, 4), "float32"))
    return rows.map(paused).with_options(options)


class Logs(keras.callbacks.Callback):
    """Neither saves nor computes."""

    def on_train_begin(self, logs=None):
        delay("host", 0.5)  # 5

    def on_epoch_begin(self, epoch, logs=None):
        delay("host", 0.4)  # 6

    def on_train_batch_end(self, batch, logs=None):
        delay("host", 0.1)  # 7


class Saves(BackupAndRestore):
    """What it takes by itself is known from outside, too."""

    def on_train_begin(self, logs=None):
        began = time.time()
        where.append("restoring")
        pause(0.7)  # 8
        super().on_train_begin(logs)
        where.pop()
        note("restoring", began)

    def on_train_batch_end(self, batch, logs=None):
        began = time.time()
        pause(0.05)  # 9
        super().on_train_batch_end(batch, logs)
        note("saving", began)


class Checkpoints(keras.callbacks.ModelCheckpoint):
    """Keras's; it saves at the end of epochs."""

    def on_epoch_end(self, epoch, logs=None):
        began = time.time()
        pause(0.5)  # 10
        super().on_epoch_end(epoch, logs)
        note("saving", began)


class First(keras.callbacks.Callback):
    """Where the start ends, and the process does, some time later."""

    def on_train_begin(self, logs=None):
        note("start", process_started_at())
        where.append("tracing")

    def on_test_begin(self, logs=None):
        where.append("validation")

    def on_test_end(self, logs=None):
        where.pop()

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        if self.steps == LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == 2 and LAST_STEP is None:  # the first one traces
            moment = random.Random(SEED).uniform(4.0, 9.0)
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()

    steps = 0


pause(0.6)  # 11: part of the start; 12 is the pause between two runs
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(
    slow_rows("input", 0.12),  # 3
    validation_data=slow_rows("validation", 0.1),  # 4
    epochs=1000,
    verbose=0,
    callbacks=[
        First(),
        Measure(f"{FOLDER}/measure", verbose=0),
        Logs(),
        Checkpoints(f"{FOLDER}/at.weights.h5", save_weights_only=True),
        Saves(f"{FOLDER}/backup", save_freq=4, asynchronous=False),
    ],
)
