"""How fast steps are on GPUs, and whether one waits for another."""

import itertools
import time

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
_SLOWEST_INPUT = 0.9  # of steps whose batch is on the GPUs already
_IMAGE = (128, 128, 3)
_IMAGES_A_GPU = 256  # 48 MiB: a few ms to a GPU, of a step of some tens
_CHANNELS = 128
_EPOCHS = 5


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


def compare_input(bench: Bench) -> Passed:
    """`fit` gets its batches to the GPUs while steps run: hardly slower than if they were there.

    The dataset gives one batch of images again and again: what is timed is the way from it to the
    GPUs, and not how fast a dataset can be.
    """
    open_devices()
    strategy = tfparallel.MirroredStrategy(bench.devices)
    model, batch = _image_model(strategy, len(bench.devices))
    of_fit_s = min(seconds_of_fit(model, batch, _EPOCHS))
    return judge_input(of_fit_s, min(_seconds_on_devices(strategy, model, batch)))


def judge_input(of_fit_s: float, on_devices_s: float) -> Passed:
    """Holds steps of `fit` against those whose batches are on their devices.

    Raises:
        CheckFailedError: if they take far longer.
    """
    text = f"{STEPS / of_fit_s:.1f} steps/s, {STEPS / on_devices_s:.1f} with batches on the GPUs"
    if on_devices_s / of_fit_s < _SLOWEST_INPUT:
        raise CheckFailedError(text)
    figures = {"steps_per_s": STEPS / of_fit_s, "on_devices_per_s": STEPS / on_devices_s}
    return Passed(text, dict(figures))


def _image_model(
    strategy: tf.distribute.Strategy, num_devices: int
) -> tuple[keras.Model, tuple[np.ndarray, np.ndarray]]:
    """A model with large inputs, and a batch."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input(_IMAGE)])
        model.add(keras.layers.Conv2D(_CHANNELS, 7, 4, activation="relu"))
        for _ in range(6):
            model.add(keras.layers.Conv2D(_CHANNELS, 3, padding="same", activation="relu"))
        model.add(keras.layers.GlobalAveragePooling2D())
        model.add(keras.layers.Dense(8))
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    rows = _IMAGES_A_GPU * num_devices
    x = np.random.default_rng(0).normal(size=(rows, *_IMAGE)).astype("float32")
    return model, (x, np.zeros((rows, 8), "float32"))


class _EpochTimes(keras.callbacks.Callback):
    """When epochs end, whose metrics have been read then."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.times.append(time.perf_counter())


def seconds_of_fit(
    model: keras.Model, batch: tuple[np.ndarray, np.ndarray], epochs: int
) -> list[float]:
    """Seconds of epochs of `STEPS` steps within one `fit`, of one batch, without a first epoch."""
    data = tf.data.Dataset.from_tensors(batch).repeat()
    ends = _EpochTimes()
    number = {"epochs": epochs + 1, "steps_per_epoch": STEPS}
    model.fit(data, **number, shuffle=False, verbose=0, callbacks=[ends])
    return [end - begin for begin, end in itertools.pairwise(ends.times)]


def _seconds_on_devices(
    strategy: tf.distribute.Strategy, model: keras.Model, batch: tuple[np.ndarray, np.ndarray]
) -> list[float]:
    """Seconds of as many steps, each replica's rows of the batch being on its device."""

    def rows_of(context: tf.distribute.experimental.ValueContext) -> tuple[tf.Tensor, ...]:
        number, count = context.replica_id_in_sync_group, context.num_replicas_in_sync
        with tf.device(strategy.extended.worker_devices[number]):
            return tuple(tf.identity(np.split(each, count)[number]) for each in batch)

    @tf.function(autograph=False)
    def step(own: tuple) -> object:
        return strategy.run(model.train_step, args=(own,))

    own = strategy.experimental_distribute_values_from_function(rows_of)
    _wait(strategy.experimental_local_results(step(own)))
    seconds = []
    for _ in range(_EPOCHS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            logs = step(own)
        _wait(strategy.experimental_local_results(logs))
        seconds.append(time.perf_counter() - begin)
    return seconds


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


def _wait(logs: object) -> None:
    for value in tf.nest.flatten(logs):
        np.asarray(value)
