r"""What a slow worker costs, and what it costs when the chief sends every batch.

    tfparallel launch --standalone --workers 3 --ps 2 benchmarks/parameter_server.py

Prints one line of JSON for each measurement; about three minutes. In the first part a worker's step
is a sleep, ten times as long on worker 0: cores do not matter. "workers" is the throughput in steps
of a fast worker that does nothing else: 2.1 is what there is, as two fast workers and a tenth make.
In sync mode a step takes a third of the batch on each worker, and waits for the slow one.

In the second part the same batches are trained on from arrays, which are shipped to workers once,
and from a generator, which only the chief can read.

In the third part a network of 1.1 million weights is trained by Adam in sync mode: without copies
to go back to when a worker is lost, with copies every 8 steps, and after every step.
"""

import json
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfparallel

FLAGS = flags.FLAGS
flags.DEFINE_list("parts", ["slow_worker", "feeding", "copies"], "What to measure.")
flags.DEFINE_float("sleep_s", 0.5, "A fast worker's step.")
flags.DEFINE_integer("async_steps", 60, "Steps to measure.")
flags.DEFINE_integer("sync_steps", 4, "Steps to measure.")
flags.DEFINE_integer("feed_steps", 100, "Steps to measure.")
flags.DEFINE_integer("copy_steps", 64, "Steps to measure.")

SLOWER = 10


class Sleep(keras.layers.Layer):
    """Sleeps where it is computed: `sleep_s`, or ten times as long on worker 0."""

    def __init__(self, sleep_s: float):
        super().__init__()
        self._sleep_us = int(sleep_s * 1e6)

    def call(self, x):
        """`x`, later."""
        context = tf.distribute.get_replica_context()
        worker = context.replica_id_in_sync_group if context else 0  # Keras looks at the shapes
        sleep_us = tf.where(tf.equal(worker, 0), SLOWER * self._sleep_us, self._sleep_us)
        once = tf.data.Dataset.range(1)
        spec = once.element_spec
        slow = tf.raw_ops.SleepDataset(
            input_dataset=tf.data.experimental.to_variant(once),
            sleep_microseconds=tf.cast(sleep_us, tf.int64),
            output_types=[spec.dtype],
            output_shapes=[spec.shape],
        )
        slow = tf.data.experimental.from_variant(slow, spec).take(1)  # the end would sleep too
        zero = slow.reduce(tf.constant(0, tf.int64), lambda total, element: total + element)
        return x + tf.cast(zero, x.dtype)


def main(_):
    """Runs on the chief; workers and parameter servers serve inside of the constructor."""
    parts = {"slow_worker": slow_worker, "feeding": feeding, "copies": copies}
    for part in FLAGS.parts:
        parts[part]()


def slow_worker() -> None:
    """The first part."""
    results = {}
    for mode in ("async", "sync"):
        strategy = tfparallel.ParameterServerStrategy(mode=mode)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), Sleep(FLAGS.sleep_s), keras.layers.Dense(1)]
            )
            model.compile("sgd", "mse")
        shares = 1 if mode == "async" else 3  # of a batch, one for each worker
        steps = FLAGS.async_steps if mode == "async" else FLAGS.sync_steps
        seconds = seconds_per_step(model, np.ones((steps * shares, 4), "float32"), shares)
        results[mode] = shares * FLAGS.sleep_s / seconds
        report(slow_worker=mode, workers=round(results[mode], 2))
    report(slow_worker="async / sync", ratio=round(results["async"] / results["sync"], 1))


def feeding() -> None:
    """The second part."""
    seconds = {}
    for source in ("arrays", "generator"):
        strategy = tfparallel.ParameterServerStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(FLAGS.feed_steps * 256, 784)).astype("float32")
        seconds[source] = seconds_per_step(model, x, 256, source == "generator")
        report(source=source, ms_per_step=round(1000 * seconds[source], 1))
    report(source="generator / arrays", ratio=round(seconds["generator"] / seconds["arrays"], 2))


def copies() -> None:
    """The third part, twice."""
    for every in (None, 8, 1, None, 8, 1):
        strategy = tfparallel.ParameterServerStrategy(mode="sync", copy_every_steps=every)
        with strategy.scope():
            layers = [keras.layers.Dense(1400, "relu"), keras.layers.Dense(10)]
            model = keras.Sequential([keras.Input((784,)), *layers])
            model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(FLAGS.copy_steps * 96, 784)).astype("float32")
        milliseconds = 1000 * seconds_per_step(model, x, 96)
        report(copy_every_steps=every, ms_per_step=round(milliseconds, 1))


def seconds_per_step(
    model: keras.Model, x: np.ndarray, batch: int, generated: bool = False
) -> float:
    """Of the second epoch: the first one traces and ships."""
    y = np.zeros((len(x), model.output_shape[-1]), "float32")

    def generate():
        for start in range(0, len(x), batch):
            yield x[start : start + batch], y[start : start + batch]

    specs = tuple(tf.TensorSpec((None, *part.shape[1:]), tf.float32) for part in (x, y))
    data = (x, y)
    options = {"batch_size": batch}
    if generated:
        dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
        data, options = (dataset.prefetch(4),), {}
    timer = Timer()
    model.fit(*data, shuffle=False, verbose=0, epochs=2, callbacks=[timer], **options)
    # Without the end, where all wait for the slowest.
    first_s, *others_s = timer.times_s[:-1]
    return (others_s[-1] - first_s) / len(others_s)


class Timer(keras.callbacks.Callback):
    """When each batch of the last epoch had been handed out, of which few are ahead of the work."""

    def on_epoch_begin(self, epoch, logs=None):
        self.times_s: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.times_s.append(time.perf_counter())


def report(**values) -> None:
    """One line of JSON."""
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    app.run(main)
