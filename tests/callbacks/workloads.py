"""What `benchmarks/kills.py` trains: four kinds of model and data, under each strategy.

A training gets its name, that of a strategy, a number that draws its data, the folder of its
backups (empty: none), where to put its results, after how many batches it sends itself which
signal, and the variables of its place among several processes.
"""

import contextlib
import json
import os
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.callbacks.pipelines import STEPS, built
from tests.callbacks.trainings import After, CountsAndDraws
from tests.conformance.cases.unbuilt import GAN
from tests.helpers import numbered, open_logical_cpus, tiny_data
from tfparallel.callbacks import BackupAndRestore
from tfparallel.replicas.model_optimizers import optimizers_of

ROWS, BATCH, EPOCHS = 32, 8, 3


def train(
    workload: str,
    strategy: str,
    variant: str,
    backup_dir: str,
    results: str,
    signals: str,
    environment: str,
) -> None:
    """Trains and writes all that can differ.

    Args:
        workload: of `WORKLOADS`.
        strategy: of `STRATEGIES`.
        variant: a number that data and options are drawn by.
        backup_dir, results: a folder and a file.
        signals: "9 after 5": SIGKILL once five batches are done; or "".
        environment: variables, as JSON.
    """
    os.environ.update(json.loads(environment))
    tf.config.threading.set_intra_op_parallelism_threads(1)  # sums in one order
    draw = random.Random(int(variant))
    keras.utils.set_random_seed(1 + int(variant))
    chosen = STRATEGIES[strategy]()
    with chosen.scope() if chosen else contextlib.nullcontext():
        model, data = WORKLOADS[workload](draw)
    counter = CountsAndDraws() if workload != "gan" else _Draws()
    number, _, batches = signals.partition(" after ")
    save = BackupAndRestore(backup_dir, save_freq=draw.choice([1, 1, 2, 3])) if backup_dir else None
    end = After(int(batches), lambda: os.kill(os.getpid(), int(number))) if signals else None
    callbacks = [each for each in (save, counter, end) if each is not None]
    data["callbacks"] = [*callbacks, *data.get("callbacks", ())]
    fitted = model.fit(epochs=EPOCHS, verbose=0, **data)
    np.savez(
        results,
        **numbered("weights", model.get_weights()),
        **numbered("optimizer", [v.numpy() for o in optimizers_of(model) for v in o.variables]),
        **numbered("seeds", [v.numpy() for v in model.variables if "seed" in v.path]),
        **{f"history/{name}": np.array(values) for name, values in fitted.history.items()},
        epochs=fitted.epoch,
        drawn=counter.drawn,
    )


class _Draws(CountsAndDraws):
    """For models whose learning rates are not one."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        pass


# ---- strategies ----------------------------------------------------------------------------------


def _mirrored() -> tf.distribute.Strategy:
    open_logical_cpus(2)
    return tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])


def _pipeline() -> tf.distribute.Strategy:
    open_logical_cpus(2)
    return tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2)


def _servers(mode: str, num_workers: int) -> tf.distribute.Strategy:
    """Servers and workers of its own, which die with it."""
    from tests.parameter_server.cluster import SERVERS, ServerProcesses
    from tests.parameter_server.spawner import Spawner

    servers = ServerProcesses(num_workers, 1, Spawner(SERVERS, by_fork=True))
    _kept.append(servers)
    os.environ.update(servers.environment("chief", 0))
    return tfparallel.ParameterServerStrategy(mode=mode)


_kept: list[Any] = []

STRATEGIES: dict[str, Callable[[], Any]] = {
    "one_device": lambda: tfparallel.OneDeviceStrategy("CPU:0"),
    "mirrored": _mirrored,
    "pipeline": _pipeline,
    "multi_worker": lambda: tfparallel.MultiWorkerMirroredStrategy(),
    "horovod": lambda: tfparallel.HorovodStrategy(),
    "servers_sync": lambda: _servers("sync", 2),
    "servers_async": lambda: _servers("async", 2),
}


# ---- workloads -----------------------------------------------------------------------------------


def _cnn(draw: random.Random) -> tuple[keras.Model, dict]:
    """Augmentation, BatchNorm, Dropout; EMA, accumulation, loss scale; callbacks that remember."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.RandomFlip(seed=draw.randrange(100)),
            layers.RandomTranslation(0.2, 0.2, seed=draw.randrange(100)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    inner = keras.optimizers.Adam(
        0.01, use_ema=True, ema_overwrite_frequency=3, gradient_accumulation_steps=2
    )
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=8.0, dynamic_growth_steps=3
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(True), metrics=["accuracy"])
    rng = np.random.default_rng(draw.randrange(1000))
    images = rng.normal(size=(ROWS, 8, 8, 1)).astype("float32")
    monitors = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True),
    ]
    labels = rng.integers(0, 3, ROWS)
    return model, {"x": images, "y": labels, "batch_size": BATCH, "callbacks": monitors}


def _dense() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def _tf_data(draw: random.Random) -> tuple[keras.Model, dict]:
    """A random pipeline over the numbers of rows; batches may be uneven."""
    steps = [(draw.choice(sorted(STEPS)), draw.randrange(6)) for _ in range(draw.randrange(4))]
    after = [
        (draw.choice(["shuffle", "prefetch"]), draw.randrange(4)) for _ in range(draw.randrange(2))
    ]
    x, y = map(tf.constant, tiny_data(ROWS))
    numbers = built((steps, draw.randrange(3, 7), after))
    rows = numbers.map(lambda n: (tf.gather(x, n % ROWS), tf.gather(y, n % ROWS)))
    return _dense(), {"x": rows}


class _Turning(keras.utils.PyDataset):
    """Gives its batches in another order in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._order = list(range(ROWS // BATCH))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        rows = slice(self._order[index] * BATCH, (self._order[index] + 1) * BATCH)
        return tuple(array[rows] for array in tiny_data(ROWS))

    def on_epoch_end(self) -> None:
        self._order = self._order[1:] + self._order[:1]


def _py_dataset(draw: random.Random) -> tuple[keras.Model, dict]:
    return _dense(), {"x": _Turning(), "shuffle": draw.choice([False, True])}


class _DrawingGAN(GAN):
    """Two optimizers, noise that is drawn in the step."""

    def __init__(self, seed: int):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(seed)

    def train_step(self, data: Any) -> dict:
        real, _ = data
        noise = keras.random.normal((tf.shape(real)[0], 3), seed=self.seeds)
        return super().train_step((real, noise))


def _gan(draw: random.Random) -> tuple[keras.Model, dict]:
    model = _DrawingGAN(draw.randrange(100))
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Nadam(0.01))
    x, y = tiny_data(ROWS)
    return model, {"x": x, "y": y, "batch_size": BATCH}


WORKLOADS: dict[str, Callable[[random.Random], tuple[keras.Model, dict]]] = {
    "cnn": _cnn,
    "tf_data": _tf_data,
    "py_dataset": _py_dataset,
    "gan": _gan,
}
