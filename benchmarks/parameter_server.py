r"""What a slow worker costs, and what it costs when the chief sends every batch.

    tfparallel launch --standalone --workers 3 --ps 2 benchmarks/parameter_server.py

Prints one line of JSON for each measurement; about four minutes. In the first part a worker's step
is a sleep, ten times as long on worker 0: cores do not matter. "workers" is the throughput in steps
of a fast worker that does nothing else: 2.1 is what there is, as two fast workers and a tenth make.
In sync mode a step takes a third of the batch on each worker, and waits for the slow one.

In the second part the same batches are trained on, in both modes and twice, from arrays, which are
shipped to workers once, from a `tf.data.Dataset`, which each worker rebuilds and reads as a whole,
and from a generator, which only the chief can read. "sent" are bytes that leave the chief.

In the third part a network of 1.1 million weights is trained by Adam in sync mode: without copies
to go back to when a worker is lost, with copies every 8 steps, and after every step.
"""

import itertools
import json
import time

import keras
import network
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
        x = np.ones((steps * shares, 4), "float32")
        seconds = measured(model, x, shares).seconds_per_step
        results[mode] = shares * FLAGS.sleep_s / seconds
        report(slow_worker=mode, workers=round(results[mode], 2))
    report(slow_worker="async / sync", ratio=round(results["async"] / results["sync"], 1))


def feeding() -> None:
    """The second part."""
    sources = ("arrays", "dataset", "generator")
    seconds: dict[tuple, float] = {}  # the shorter of two
    for _, mode, source in itertools.product(range(2), ("async", "sync"), sources):
        strategy = tfparallel.ParameterServerStrategy(mode=mode)
        with strategy.scope():
            model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(FLAGS.feed_steps * 256, 784)).astype("float32")
        timer = measured(model, x, 256, source)
        seconds[mode, source] = min(seconds.get((mode, source), 1e9), timer.seconds_per_step)
        report(
            mode=mode,
            source=source,
            ms_per_step=round(1000 * timer.seconds_per_step, 1),
            sent_kb_per_step=round(timer.sent_per_step / 1000, 1),
        )
    for mode, source in itertools.product(("async", "sync"), sources[:2]):
        ratio = seconds[mode, "generator"] / seconds[mode, source]
        report(mode=mode, source=f"generator / {source}", ratio=round(ratio, 2))


def copies() -> None:
    """The third part, twice."""
    for every in (None, 8, 1, None, 8, 1):
        strategy = tfparallel.ParameterServerStrategy(mode="sync", copy_every_steps=every)
        with strategy.scope():
            layers = [keras.layers.Dense(1400, "relu"), keras.layers.Dense(10)]
            model = keras.Sequential([keras.Input((784,)), *layers])
            model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(FLAGS.copy_steps * 96, 784)).astype("float32")
        milliseconds = 1000 * measured(model, x, 96).seconds_per_step
        report(copy_every_steps=every, ms_per_step=round(milliseconds, 1))


def measured(model: keras.Model, x: np.ndarray, batch: int, source: str = "arrays") -> "Timer":
    """Of the second epoch: the first one traces and ships."""
    y = np.zeros((len(x), model.output_shape[-1]), "float32")

    def generate():
        for start in range(0, len(x), batch):
            yield x[start : start + batch], y[start : start + batch]

    specs = tuple(tf.TensorSpec((None, *part.shape[1:]), tf.float32) for part in (x, y))
    data, options = (x, y), {"batch_size": batch}
    if source == "dataset":
        data, options = (tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).prefetch(4),), {}
    if source == "generator":
        dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
        data, options = (dataset.prefetch(4),), {}
    timer = Timer()
    model.fit(*data, shuffle=False, verbose=0, epochs=2, callbacks=[timer], **options)
    return timer


class Timer(keras.callbacks.Callback):
    """When each batch of the last epoch had been handed out, of which few are ahead of the work."""

    def on_epoch_begin(self, epoch, logs=None):
        self._times_s: list[float] = []
        self._sent_before = network.sent_by_this_process()

    def on_train_batch_end(self, batch, logs=None):
        self._times_s.append(time.perf_counter())

    def on_epoch_end(self, epoch, logs=None):
        self.sent_per_step = (network.sent_by_this_process() - self._sent_before) / len(
            self._times_s
        )

    @property
    def seconds_per_step(self) -> float:
        """Without the end, where all wait for the slowest."""
        first_s, *others_s = self._times_s[:-1]
        return (others_s[-1] - first_s) / len(others_s)


def report(**values) -> None:
    """One line of JSON."""
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    app.run(main)
