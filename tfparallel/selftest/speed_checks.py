"""How fast steps are on GPUs, and whether one waits for another."""

import time
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.verdicts import CheckFailedError, Passed

STEPS = 20
_WIDTH = 4096
_ROWS_A_GPU = 2048
_SLOWEST_LAUNCH = 0.5  # of a step
_SLOWEST_TO_STOCK = 0.9


def launch_ahead(bench: Bench) -> Passed:
    """A step is launched before the step ahead of it has ended: no wait for the GPU in between."""
    open_devices()
    strategy = tfparallel.MirroredStrategy(bench.devices)
    model, x, y = wide_model(strategy, len(bench.devices))
    batch = len(x) // STEPS
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).repeat()
    model.fit(data, steps_per_epoch=2, verbose=0)
    function = model.make_train_function()
    with strategy.scope():
        iterator = iter(strategy.experimental_distribute_dataset(data))
    _wait(function(iterator))
    begin = time.perf_counter()
    logs = [function(iterator) for _ in range(STEPS)]
    launched = time.perf_counter() - begin
    _wait(logs[-1])
    share = launched / (time.perf_counter() - begin)
    if share > _SLOWEST_LAUNCH:
        raise CheckFailedError(f"launching takes {share:.0%} of the steps: each waits for the GPU")
    return Passed(f"launching takes {share:.0%} of the time of steps", {"share": share})


def compare_speed(bench: Bench) -> Passed:
    """Steps a second beside TensorFlow's own strategy, in turn."""
    open_devices()
    ours = _timed(tfparallel.MirroredStrategy(bench.devices), bench)
    stock = _timed(tf.distribute.MirroredStrategy(bench.devices), bench)
    pairs = [(next(ours), next(stock)) for _ in range(5)]
    own, other = (float(np.median(times)) for times in zip(*pairs, strict=True))
    text = f"{STEPS / own:.1f} steps/s, tf.distribute {STEPS / other:.1f}"
    if other / own < _SLOWEST_TO_STOCK:
        raise CheckFailedError(text)
    return Passed(text, {"steps_per_s": STEPS / own, "stock_steps_per_s": STEPS / other})


def wide_model(
    strategy: tf.distribute.Strategy, num_devices: int
) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A model whose steps keep a GPU busy, and rows and targets of `STEPS` batches."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(8)])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    rows = _ROWS_A_GPU * num_devices * STEPS
    x = np.random.default_rng(0).normal(size=(rows, 256)).astype("float32")
    return model, x, np.ascontiguousarray(x[:, :8])


def _timed(strategy: tf.distribute.Strategy, bench: Bench) -> Iterator[float]:
    """Seconds of an epoch, one after the other."""
    model, x, y = wide_model(strategy, len(bench.devices))
    options = {"batch_size": len(x) // STEPS, "verbose": 0}
    model.fit(x, y, **options)
    while True:
        begin = time.perf_counter()
        model.fit(x, y, **options)
        yield time.perf_counter() - begin


def _wait(logs: object) -> None:
    for value in tf.nest.flatten(logs):
        np.asarray(value)
