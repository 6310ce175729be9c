"""Small trainings that together hold every kind of state; each runs in a process of its own.

A training takes the folder of its backups (empty: none), where to put its results, and after how
many batches it sends itself SIGKILL (0: never), or SIGTERM if the number is negative.
"""

import contextlib
import datetime
import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.conformance.cases.unbuilt import GAN
from tests.helpers import numbered, open_logical_cpus, tiny_data
from tfparallel.callbacks import BackupAndRestore, LeaseError
from tfparallel.replicas.model_optimizers import optimizers_of

EPOCHS = 4
ROWS, BATCH = 40, 12  # four batches, the last of 4 rows: uneven for three replicas


class After(keras.callbacks.Callback):
    """Calls `action` after so many batches."""

    def __init__(self, batches: int, action):
        super().__init__()
        self._left, self._action = batches, action

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if self._left == 0:
            self._action()


class Noise(keras.layers.Layer):
    """Draws from Keras's global seed generator."""

    def call(self, x, training=False):
        return x + keras.random.normal((6,), stddev=0.1) if training else x


class CountsAndDraws(keras.callbacks.Callback):
    """A callback of a user, with a state of its own, that draws from Python and NumPy."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.9 * float(
            keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)
        )

    def on_train_batch_end(self, batch, logs=None):
        self.drawn.append(np.random.uniform() + float(tf.random.uniform([])))

    def get_state(self):
        return {"drawn": self.drawn}

    def set_state(self, state):
        self.drawn = list(state["drawn"])


def plain_arrays(*arguments):
    """No strategy, a model without shapes, shuffled arrays, a callback of every kind."""
    x, y = tiny_data(ROWS)
    monitors = [
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True),
    ]
    _train(
        None,
        arguments,
        optimizer=lambda: keras.optimizers.Adam(
            0.01, use_ema=True, ema_overwrite_frequency=3, gradient_accumulation_steps=2
        ),
        callbacks=monitors,
        x=x,
        y=y,
        batch_size=BATCH,
        validation_split=0.25,
    )


def eager_arrays(*arguments):
    """Nothing is traced, so that a process is soon in the midst of its training."""
    x, y = tiny_data(ROWS)
    _train(None, arguments, run_eagerly=True, epochs=6, x=x, y=y, batch_size=BATCH)


def impatient_arrays(*arguments):
    """Gives up soon if another training has the folder; if not, waits until another gave up."""
    told = Path(arguments[1]).with_name("told")
    x, y = tiny_data(ROWS)
    options = {"epochs": 2, "lease_s": 1.0, "x": x, "y": y, "batch_size": BATCH}
    waits = [After(3, lambda: _until(told.exists))] if arguments[0] else []
    try:
        _train(None, arguments, run_eagerly=True, callbacks=waits, **options)
    except LeaseError:
        told.touch()
        raise


def _until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def plain_dataset(*arguments):
    """A shuffled dataset whose augmentation draws in a stateful op: no checkpoint of it exists."""

    def augment(x, y):
        return x + tf.random.normal([6], stddev=0.1), y

    data = tf.data.Dataset.from_tensor_slices(tiny_data(ROWS))
    _train(
        None,
        arguments,
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=8.0, dynamic_growth_steps=3
        ),
        data=lambda: data.shuffle(20).map(augment).batch(BATCH),
    )


def one_device_py_dataset(*arguments):
    class Batches(keras.utils.PyDataset):
        order = list(range(4))

        def __len__(self):
            return 4

        def __getitem__(self, index):
            rows = slice(self.order[index] * 10, self.order[index] * 10 + 10)
            return tuple(array[rows] for array in tiny_data(ROWS))

        def on_epoch_end(self):
            self.order = self.order[1:] + self.order[:1]

    strategy = tfparallel.OneDeviceStrategy("CPU:0")
    _train(strategy, arguments, data=Batches, shuffle=True)


def mirrored_arrays(*arguments):
    open_logical_cpus(3)
    x, y = tiny_data(ROWS)
    strategy = tfparallel.MirroredStrategy([f"CPU:{i}" for i in range(3)])
    _train(strategy, arguments, x=x, y=y, batch_size=BATCH)


def central_dataset(*arguments):
    """One iterator over epochs that end in the middle of the data; two steps an execution."""
    open_logical_cpus(2)

    def data():
        return tf.data.Dataset.from_tensor_slices(tiny_data(ROWS)).shuffle(20).batch(8).repeat()

    strategy = tfparallel.CentralStorageStrategy(["CPU:0", "CPU:1"])
    _train(strategy, arguments, data=data, steps_per_epoch=6, steps_per_execution=2)


def pipeline_arrays(*arguments):
    """Two stages, four microbatches of two rows."""
    open_logical_cpus(2)
    x, y = tiny_data(ROWS)
    strategy = tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=4)
    _train(strategy, arguments, x=x, y=y, batch_size=8)


def plain_gan(*arguments):
    """Two optimizers, no `call`, and no shapes: nothing of it is there before the first step."""
    _train_gan(None, arguments)


def mirrored_gan(*arguments):
    open_logical_cpus(3)
    _train_gan(tfparallel.MirroredStrategy([f"CPU:{i}" for i in range(3)]), arguments)


def _train_gan(strategy, arguments):
    """As in tests/conformance/cases/unbuilt.py, with noise that is drawn."""

    class DrawingGAN(GAN):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def train_step(self, data):
            real, _ = data
            noise = keras.random.normal((tf.shape(real)[0], 3), seed=self.seeds)
            return super().train_step((real, noise))

    def gan(options):
        model = DrawingGAN()
        optimizers = {"d_optimizer": keras.optimizers.Adam(0.01)}
        optimizers["g_optimizer"] = keras.optimizers.Nadam(0.01)
        model.compile(**optimizers, **options)
        return model

    x, y = tiny_data(ROWS)
    _train(strategy, arguments, make_model=gan, x=x, y=y, batch_size=BATCH)


def plain_generator(*arguments):
    def batches():
        rng = np.random.default_rng(0)
        while True:
            yield rng.normal(size=(8, 6)).astype("float32"), rng.integers(0, 3, 8)

    _train(None, arguments, data=batches, steps_per_epoch=4)


class Batches:
    """Random batches without end; knows where it is."""

    def __init__(self):
        self._rng = np.random.default_rng(0)
        self.made = 0

    def __iter__(self):
        while True:
            self.made += 1
            yield self._rng.normal(size=(8, 6)).astype("float32"), self._rng.integers(0, 3, 8)

    def get_state(self):
        return self._rng.bit_generator.state

    def set_state(self, state):
        self._rng.bit_generator.state = state


def mirrored_resumable_generator(*arguments):
    open_logical_cpus(2)
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    data = lambda: tfparallel.callbacks.resumable(Batches())  # noqa: E731
    _train(strategy, arguments, data=data, steps_per_epoch=4)


def parameter_server(
    backup_dir, results, kill_at, mode="sync", num_workers=2, as_dataset=False, is_other=False
):
    """A chief with workers and a parameter server of its own, which die with it.

    Args:
        kill_at: "ps 5" kills the parameter server after five batches, "5" the chief.
        as_dataset: of `tf.data`, rebuilt on the workers, instead of arrays.
        is_other: with other data than the trainings of this name without it.
    """
    from tests.parameter_server.cluster import SERVERS, ServerProcesses
    from tests.parameter_server.spawner import Spawner
    from tfparallel.parameter_server import Timeouts

    servers = ServerProcesses(num_workers, 1, Spawner(SERVERS, by_fork=True))
    os.environ.update(servers.environment("chief", 0))
    timeouts = Timeouts(all_workers_s=1)  # a worker that is killed is not started again
    strategy = tfparallel.ParameterServerStrategy(mode=mode, timeouts=timeouts)
    x, y = tiny_data(ROWS)
    whose, _, kill_at = kill_at.rpartition(" ")
    callbacks = []
    if whose:
        callbacks = [After(int(kill_at), lambda: servers.kill(whose, 0))]
        kill_at = "0"
    arguments = (backup_dir, results, kill_at)
    x = x + 1 if is_other else x
    if as_dataset:
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20, seed=3).batch(BATCH)
        _train(strategy, arguments, callbacks=callbacks, data=lambda: dataset)
    else:
        _train(strategy, arguments, callbacks=callbacks, x=x, y=y, batch_size=BATCH)


def parameter_server_other(*arguments):
    parameter_server(*arguments, is_other=True)


def parameter_server_dataset(*arguments):
    parameter_server(*arguments, as_dataset=True)


def parameter_server_dataset_other(*arguments):
    parameter_server(*arguments, as_dataset=True, is_other=True)


def parameter_server_async(*arguments):
    """One worker, so that the order of its steps is always the same."""
    parameter_server(*arguments, mode="async", num_workers=1)


def parameter_server_async_other(*arguments):
    parameter_server(*arguments, mode="async", num_workers=1, is_other=True)


def parameter_server_async_dataset(*arguments):
    parameter_server(*arguments, mode="async", num_workers=1, as_dataset=True)


def parameter_server_async_dataset_other(*arguments):
    parameter_server(*arguments, mode="async", num_workers=1, as_dataset=True, is_other=True)


def multi_worker(backup_dir, results, kill_at, tf_config, save_freq=1, **options):
    """Two workers, or one without a `TF_CONFIG`."""
    if tf_config:
        os.environ["TF_CONFIG"] = tf_config
    strategy = tfparallel.MultiWorkerMirroredStrategy(**options)
    x, y = tiny_data(ROWS)
    arguments = (backup_dir, results, kill_at)
    _train(strategy, arguments, x=x, y=y, batch_size=BATCH, save_freq=save_freq)


def multi_worker_of_unknown_length(backup_dir, results, kill_at, tf_config, is_other=False):
    """A filtered dataset: workers agree on each batch, as nobody knows how many there are."""
    os.environ["TF_CONFIG"] = tf_config
    strategy = tfparallel.MultiWorkerMirroredStrategy()
    x, y = tiny_data(ROWS)
    rows = tf.data.Dataset.from_tensor_slices((x + 1 if is_other else x, y))
    options = tf.data.Options()
    options.autotune.enabled = False  # a buffer of batches would come back with them
    data = rows.filter(lambda x, y: x[0] > -9).batch(BATCH).with_options(options)
    _train(strategy, (backup_dir, results, kill_at), data=lambda: data)


def multi_worker_of_unknown_length_other(*arguments):
    multi_worker_of_unknown_length(*arguments, is_other=True)


def sharded_workers(backup_dir, results, kill_at, tf_config, replicas=1, **options):
    """Workers that share every weight and slot; without any, the devices of a process do."""
    os.environ["TF_CONFIG"] = tf_config
    x, y = tiny_data(ROWS)
    arguments = (backup_dir, results, kill_at)
    strategy = tfparallel.ShardedStrategy(min_size=1, replicas=replicas)
    _train(strategy, arguments, x=x, y=y, batch_size=BATCH, save_freq=1, **options)


def sharded_workers_without_noise(*arguments, **options):
    """The same of a model that draws nothing, so that any number of workers trains alike."""

    def make_model(options):
        norm = keras.layers.BatchNormalization(synchronized=True)
        layers = [keras.layers.Dense(7, "tanh"), norm, keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **options)
        return model

    sharded_workers(*arguments, make_model=make_model, **options)


def sharded_workers_in_two_copies(*arguments):
    """The same, of neighbours that share a copy."""
    sharded_workers_without_noise(*arguments, replicas=2)


def multi_worker_compressed(*arguments):
    """Workers that remember what they have not sent, each something else."""
    multi_worker(*arguments, compression=tfparallel.compression.PowerSGD(rank=1))


def multi_worker_compressed_around_replicas(*arguments):
    """The same, where what trains in a worker is a strategy of its own."""
    inner = tfparallel.MirroredStrategy
    multi_worker(*arguments, compression=tfparallel.compression.PowerSGD(rank=1), inner=inner)


def multi_worker_by_the_clock(*arguments):
    """Saves as often as workers can agree that it is time to."""
    multi_worker(*arguments, save_freq=datetime.timedelta(microseconds=1))


def _classifier(strategy, optimizer, options):
    model = keras.Sequential(
        [
            *([keras.Input((6,))] if strategy else []),
            Noise(),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer(), loss=loss, metrics=["accuracy"], **options)
    return model


def _train(
    strategy,
    arguments,
    optimizer=lambda: keras.optimizers.Adam(0.01),
    data=None,
    callbacks=(),
    steps_per_execution=1,
    save_freq=1,
    run_eagerly=False,
    epochs=EPOCHS,
    make_model=None,
    lease_s=60.0,
    **fit_options,
):
    """Trains with a backup after every batch and writes everything that can differ to a file."""
    backup_dir, results, kill_at = arguments
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        options = {"steps_per_execution": steps_per_execution, "run_eagerly": run_eagerly}
        model = make_model(options) if make_model else _classifier(strategy, optimizer, options)
    counter = CountsAndDraws()
    # Who kills itself at a given batch knows which backup it leaves: the one before.
    options = {"save_freq": save_freq, "asynchronous": kill_at == "0", "lease_s": lease_s}
    backup = [BackupAndRestore(backup_dir, **options)] if backup_dir else []
    number = signal.SIGKILL if int(kill_at) > 0 else signal.SIGTERM
    kill = After(abs(int(kill_at)), lambda: os.kill(os.getpid(), number))
    callbacks = [*backup, counter, *callbacks, kill]
    if data is not None:
        fit_options = {"shuffle": False, **fit_options, "x": data()}
    fitted = model.fit(callbacks=callbacks, epochs=epochs, verbose=0, **fit_options)
    np.savez(
        results,
        **numbered("weights", model.get_weights()),
        **numbered("optimizer", [v.numpy() for o in optimizers_of(model) for v in o.variables]),
        **numbered("seeds", [v.numpy() for v in model.variables if "seed" in v.path]),
        **{f"history/{name}": np.array(values) for name, values in fitted.history.items()},
        epochs=fitted.epoch,
        drawn=counter.drawn,
        random_state=np.random.get_state(legacy=False)["state"]["key"],
    )
