"""What slows a training down, each alone: trainings that `measure.py` runs and `Measure` judges.

    python benchmarks/measure_causes.py NAME FOLDER     # one of them, in this process

Each knows how many seconds of its last epoch it has taken away: it looks at the clock around what
it does. Ranks of a job are started by `measure.py`.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import keras
import numpy as np
import tensorflow as tf

WIDTH, ROWS, STEPS = 512, 64, 24
EPOCHS = 3  # the first one traces, the second one has no fault, the third one has
DELAY_S = 0.06  # each step, or as long as that all together


class Injected:
    """How long a fault has taken, by all threads together.

    Attributes:
        seconds: so far.
        is_on: whether it delays anything; the epoch before shows what there is without it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_on = False

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began_s

    def sleep(self, seconds: float = DELAY_S) -> None:
        """Delays whoever calls it."""
        if self.is_on:
            with self.taking():
                time.sleep(seconds)

    def compute(self, work: Callable[[], Any]) -> None:
        """Does some work again and again for as long as a delay takes."""
        if self.is_on:
            with self.taking():
                until = time.perf_counter() + DELAY_S
                while time.perf_counter() < until:
                    work()


@dataclass
class Fault:
    """One training.

    Attributes:
        data: what `fit` is given, made of `Injected`.
        callbacks: beside `Measure`.
        model: compiled.
        expected: the cause that `Measure` should name, or several that are as true.
        category: whose share should be that of the injected seconds; "" where nothing was timed.
        options: of `fit`.
    """

    expected: tuple[str, ...]
    category: str = ""
    data: Callable[[Injected], Any] | None = None
    callbacks: Callable[[Injected, Path], list] = lambda injected, folder: []
    model: Callable[[], keras.Model] | None = None
    options: dict = field(default_factory=dict)


def arrays(rows: int = STEPS * ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Random features and targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, WIDTH)).astype("float32")
    return x, x[:, :1].copy()


def dataset(rows: int = STEPS * ROWS) -> tf.data.Dataset:
    """Batches of them that are there at once."""
    batches = [each.reshape(-1, ROWS, each.shape[-1]) for each in arrays(rows)]
    return nothing_ahead(tf.data.Dataset.from_tensor_slices(tuple(batches)))


def nothing_ahead(made: tf.data.Dataset) -> tf.data.Dataset:
    """tf.data puts a prefetch behind pipelines, which hides as much of a delay as a step takes."""
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    return made.with_options(options)


def plain_model(**options: Any) -> keras.Model:
    """Three dense layers of 512, about a hundredth of a second a step."""
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


# ---- input ---------------------------------------------------------------------------------------


def slow_map(injected: Injected, **options: Any) -> tf.data.Dataset:
    """A map that sleeps for each batch."""

    def pause(x: np.ndarray) -> np.ndarray:
        injected.sleep()
        return x

    def paused(x: tf.Tensor, y: tf.Tensor) -> tuple:
        return tf.ensure_shape(tf.numpy_function(pause, [x], x.dtype), x.shape), y

    return dataset().map(paused, **options)


def slow_generator(injected: Injected) -> tf.data.Dataset:
    """`from_generator`, which sleeps."""
    spec = (tf.TensorSpec([ROWS, WIDTH]), tf.TensorSpec([ROWS, 1]))
    made = tf.data.Dataset.from_generator(lambda: python_batches(injected), output_signature=spec)
    return nothing_ahead(made)


def python_batches(injected: Injected) -> Iterator:
    """Batches of Python, each after a sleep."""
    x, y = arrays()
    for i in range(0, len(x), ROWS):
        injected.sleep()
        yield x[i : i + ROWS], y[i : i + ROWS]


def endless(injected: Injected) -> Iterator:
    """The same, again and again."""
    while True:
        yield from python_batches(injected)


class SlowFiles(keras.utils.PyDataset):
    """Keras's own, on one thread."""

    def __init__(self, injected: Injected):
        super().__init__(workers=1)
        self._injected, self._arrays = injected, arrays()

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple:
        self._injected.sleep()
        return tuple(each[index * ROWS : (index + 1) * ROWS] for each in self._arrays)


def slow_disk(injected: Injected) -> tf.data.Dataset:
    """Records of a file that gives a batch in each `DELAY_S`: a pipe that is written so slowly."""
    folder = Path(os.environ["MEASURE_FOLDER"])
    path = folder / "records"
    os.mkfifo(path)
    batch = tf.io.serialize_tensor(np.ones((ROWS, WIDTH), "float32")).numpy()
    size = len(batch)

    def write() -> None:
        for _ in range(EPOCHS):
            with path.open("wb", buffering=0) as file:
                for _ in range(STEPS):
                    injected.sleep()
                    file.write(batch)

    threading.Thread(target=write, daemon=True).start()
    records = tf.data.FixedLengthRecordDataset(str(path), size, buffer_size=1)

    def parsed(record: tf.Tensor) -> tuple:
        x = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), [ROWS, WIDTH])
        return x, x[:, :1]

    return nothing_ahead(records.map(parsed))


def slow_filter(injected: Injected) -> tf.data.Dataset:
    """A predicate that takes its time."""

    def looked_at(x: np.ndarray) -> np.bool_:
        injected.sleep()
        return np.bool_(True)

    def taken(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(looked_at, [x], tf.bool), [])

    return dataset().filter(taken)


def slow_interleave(injected: Injected) -> tf.data.Dataset:
    """Sources that are read one after the other, each slow."""
    return tf.data.Dataset.range(1).interleave(
        lambda _: slow_map(injected), cycle_length=1, num_parallel_calls=None
    )


# ---- callbacks -----------------------------------------------------------------------------------


class SleepsAtTheEnd(keras.callbacks.Callback):
    """Of each batch."""

    def __init__(self, injected: Injected):
        super().__init__()
        self.injected = injected

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.injected.sleep()


class SleepsAtTheBeginning(SleepsAtTheEnd):
    """Of each batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.injected.sleep()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


class Computes(SleepsAtTheEnd):
    """In Python, as statistics of logs do."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.injected.compute(lambda: sum(range(1000)))


class WritesAndSyncs(SleepsAtTheEnd):
    """Lines of log that are on the disk before the training goes on."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with open(os.environ["MEASURE_FOLDER"] + "/log", "ab") as file:
            self.injected.compute(lambda: (file.write(b"x" * 4096), os.fsync(file.fileno())))


class ReadsWeights(SleepsAtTheEnd):
    """All weights, again and again, to look at them."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.injected.compute(self.model.get_weights)


class AtTheEpochsBeginning(SleepsAtTheEnd):
    """As one who draws samples of data before each epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.injected.sleep(DELAY_S * STEPS)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


class Saves:
    """Any callback that saves, timed from outside; its class keeps its name."""

    @staticmethod
    def timed(callback: keras.callbacks.Callback, injected: Injected) -> keras.callbacks.Callback:
        original = callback.on_train_batch_end

        def on_train_batch_end(batch: int, logs: Any = None) -> None:
            with injected.taking():
                original(batch, logs)

        callback.on_train_batch_end = on_train_batch_end
        return callback


def checkpoints(injected: Injected, folder: Path) -> list:
    """Keras's, after each batch."""
    path = str(folder / "at.weights.h5")
    callback = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=1)
    return [Saves.timed(callback, injected)]


def whole_models(injected: Injected, folder: Path) -> list:
    """Keras's, of whole models, after each batch."""
    callback = keras.callbacks.ModelCheckpoint(str(folder / "at.keras"), save_freq=1)
    return [Saves.timed(callback, injected)]


def keras_backups(injected: Injected, folder: Path) -> list:
    """Keras's, after each batch."""
    callback = keras.callbacks.BackupAndRestore(str(folder / "keras"), save_freq=1)
    return [Saves.timed(callback, injected)]


def backups(injected: Injected, folder: Path) -> list:
    """Ours, after each batch, and waiting until it is written."""
    from tfparallel.callbacks import BackupAndRestore

    callback = BackupAndRestore(folder / "ours", save_freq=1, asynchronous=False)
    return [Saves.timed(callback, injected)]


class TracesAgain(keras.callbacks.Callback):
    """The step, each time."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.make_train_function(force=True)


def tiny_batches(injected: Injected) -> tf.data.Dataset:
    """Of one row."""
    made = tf.data.Dataset.from_tensor_slices(arrays(300)).batch(1, drop_remainder=True)
    return nothing_ahead(made)


def tiny_model() -> keras.Model:
    """So small that Python takes longer."""
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


# ---- pipelines -----------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("measure_causes")
class Slow(keras.layers.Layer):
    """A layer that sleeps, forward."""

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def paused(x: tf.Tensor) -> tuple:
            def pause(rows: np.ndarray) -> np.ndarray:
                time.sleep(DELAY_S / 2)
                return rows

            return tf.ensure_shape(tf.numpy_function(pause, [x], x.dtype), x.shape), lambda dy: dy

        return paused(inputs)


def pipeline(widths: list, stages: int = 2, microbatches: int = 8, **options: Any) -> keras.Model:
    """Dense layers of these widths, "slow" among them, on logical CPUs."""
    import tfparallel

    cpus = [f"CPU:{i}" for i in range(stages)]
    strategy = tfparallel.PipelineStrategy(cpus, num_microbatches=microbatches, **options)
    with strategy.scope():
        layers = [Slow() if w == "slow" else keras.layers.Dense(w, "relu") for w in widths]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


# ---- several ranks -------------------------------------------------------------------------------


def workers(width: int = WIDTH) -> keras.Model:
    """Replicas of `TF_CONFIG`."""
    import tfparallel

    strategy = tfparallel.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def rank() -> int:
    """Of this process."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return int(config.get("task", {}).get("index", 0))


def on_rank_1(callback: type) -> Callable[[Injected, Path], list]:
    """A callback that the second rank alone has."""
    return lambda injected, folder: [callback(injected)] if rank() == 1 else []


def slow_map_on_rank_1(injected: Injected) -> tf.data.Dataset:
    """Data that the second rank alone waits for."""
    return slow_map(injected) if rank() == 1 else dataset()


class Slower(keras.layers.Layer):
    """Sleeps on the second rank."""

    def call(self, inputs: Any) -> Any:
        return Slow()(inputs) if rank() == 1 else inputs


def workers_with_a_slow_one() -> keras.Model:
    """The second rank takes longer for each forward pass."""
    import tfparallel

    strategy = tfparallel.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu"), Slower()]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def _callback(kind: type) -> Callable[[Injected, Path], list]:
    return lambda injected, folder: [kind(injected)]


FAULTS: dict[str, Fault] = {
    "map, one thread": Fault(("input: map",), "input", slow_map),
    "map, many threads": Fault(
        ("input: map",), "", lambda i: slow_map(i, num_parallel_calls=2, deterministic=True)
    ),
    "from_generator": Fault(("input: generator",), "input", slow_generator),
    "Python generator": Fault(
        ("input: generator", "input"), "", endless, options={"steps_per_epoch": STEPS}
    ),
    "PyDataset": Fault(("input: generator", "input"), "", SlowFiles),
    "disk": Fault(("input: files",), "", slow_disk),
    "filter": Fault(("input: filter",), "input", slow_filter),
    "interleave": Fault(("input: map", "input: files"), "input", slow_interleave),
    "callback sleeps at the end": Fault(
        ("host: callback SleepsAtTheEnd",), "host", callbacks=_callback(SleepsAtTheEnd)
    ),
    "callback sleeps at the beginning": Fault(
        ("host: callback SleepsAtTheBeginning",), "host", callbacks=_callback(SleepsAtTheBeginning)
    ),
    "callback computes": Fault(("host: callback Computes",), "host", callbacks=_callback(Computes)),
    "callback writes": Fault(
        ("host: callback WritesAndSyncs",), "host", callbacks=_callback(WritesAndSyncs)
    ),
    "callback reads weights": Fault(
        ("host: callback ReadsWeights",), "host", callbacks=_callback(ReadsWeights)
    ),
    "callback of the epoch": Fault(
        ("host: callback AtTheEpochsBeginning",), "host", callbacks=_callback(AtTheEpochsBeginning)
    ),
    "tiny batch": Fault(("host: tiny batch",), "", tiny_batches, model=tiny_model),
    "ModelCheckpoint": Fault(("saving: ModelCheckpoint",), "saving", callbacks=checkpoints),
    "ModelCheckpoint, whole": Fault(("saving: ModelCheckpoint",), "saving", callbacks=whole_models),
    "BackupAndRestore of Keras": Fault(
        ("saving: BackupAndRestore",), "saving", callbacks=keras_backups
    ),
    "BackupAndRestore": Fault(("saving: BackupAndRestore",), "saving", callbacks=backups),
    "retracing": Fault(("tracing: retracing",), "", callbacks=lambda i, f: [TracesAgain()]),
    "run_eagerly": Fault(("run_eagerly",), "", model=lambda: plain_model(run_eagerly=True)),
    "one thread": Fault(("threads",)),
    "slow stage": Fault(("imbalance: stage",), "", model=lambda: pipeline([WIDTH, "slow", "slow"])),
    "unbalanced partition": Fault(
        ("imbalance: stage",),
        "",
        model=lambda: pipeline([WIDTH, 2048, 2048, 2048], partition=[1, 4]),
    ),
    "few microbatches": Fault(
        ("bubble: schedule",), "", model=lambda: pipeline([WIDTH] * 4, microbatches=1)
    ),
    "slow rank": Fault(("imbalance: rank",), "", model=workers_with_a_slow_one),
    "callback of one rank": Fault(
        ("imbalance: rank",), "", model=workers, callbacks=on_rank_1(SleepsAtTheEnd)
    ),
    "data of one rank": Fault(("imbalance: rank",), "", slow_map_on_rank_1, model=workers),
    "link of 100 Mbit/s": Fault(("communication: slow link",), "", model=workers),
}
OF_RANKS = ("slow rank", "callback of one rank", "data of one rank", "link of 100 Mbit/s")

HEALTHY: dict[str, Callable[[], tuple[keras.Model, Any]]] = {
    "arrays": lambda: (plain_model(), arrays()),
    "tf.data": lambda: (plain_model(), dataset()),
    "tf.data, prefetched": lambda: (plain_model(), dataset().prefetch(2)),
    "a cheap map": lambda: (plain_model(), dataset().map(lambda x, y: (x * 2, y))),
    "shuffled": lambda: (plain_model(), dataset().shuffle(8)),
    "adam": lambda: (_compiled("adam"), dataset()),
    "rmsprop": lambda: (_compiled("rmsprop"), dataset()),
    "one device": lambda: (_under("OneDeviceStrategy", "CPU:0"), dataset()),
    "mirrored": lambda: (_under("MirroredStrategy", 2), dataset()),
    "central storage": lambda: (_under("CentralStorageStrategy", ["CPU:0", "CPU:1"]), dataset()),
}


def _compiled(optimizer: str) -> keras.Model:
    model = plain_model()
    model.compile(optimizer, "mse")
    return model


def _under(name: str, devices: Any) -> keras.Model:
    import tfparallel

    with getattr(tfparallel, name)(devices).scope():
        return plain_model()


def run(name: str, folder: Path) -> dict[str, Any]:
    """One training; what it injected and what `Measure` says of its last epoch."""
    os.environ["MEASURE_FOLDER"] = str(folder)
    fault, injected = FAULTS[name], Injected()
    keras.utils.set_random_seed(0)
    model = (fault.model or plain_model)()
    data = dataset() if fault.data is None else fault.data(injected)
    callbacks = fault.callbacks(injected, folder)
    return _measured(model, data, callbacks, injected, fault.category, **fault.options)


def run_healthy(name: str) -> dict[str, Any]:
    """One training that nothing slows down."""
    model, data = HEALTHY[name]()
    return _measured(model, data, [], Injected(), "")


def _measured(
    model: keras.Model,
    data: Any,
    callbacks: list,
    injected: Injected,
    category: str,
    **options: Any,
) -> dict[str, Any]:
    from tfparallel.callbacks import Measure

    measure = Measure(verbose=0)
    before: list[float] = []
    verdicts: list = []

    class Marks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            injected.is_on = epoch == EPOCHS - 1
            before.append(injected.seconds)

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            verdicts.append(measure.verdict)

    x, y = data if isinstance(data, tuple) else (data, None)
    batch = ROWS if y is not None else None
    # Marks first: what others do at an epoch's beginning is of the epoch.
    model.fit(
        x,
        y,
        batch_size=batch,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[Marks(), *callbacks, measure, Reads()],
        **options,
    )
    control, record = measure.records[-2:]
    took_s = injected.seconds - before[-1]
    others_s = 0.0 if category == "saving" else control.seconds.get(category, 0.0)
    off_s = record.seconds.get(category, 0.0) - others_s - took_s
    return {
        "cause": verdicts[-1].cause,
        "text": verdicts[-1].text,
        "shares": record.shares,
        "wall_s": record.wall_s,
        "injected": took_s / record.wall_s,
        "off": off_s / record.wall_s,
    }


def main(name: str, folder: str) -> None:
    """Prints one line of JSON."""
    found = run_healthy(name) if name in HEALTHY else run(name, Path(folder))
    if rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    cpus = int(os.environ.get("MEASURE_CPUS", "2"))
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * cpus,
    )
    main(*sys.argv[1:])
