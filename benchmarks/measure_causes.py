"""What slows a training down, each alone: trainings that `measure.py` runs and `Measure` judges.

    python benchmarks/measure_causes.py NAME FOLDER     # one of them, in this process

Each knows how many seconds of its last epoch it has taken away: it looks at the clock around what
it does, or they follow from what was set (a link's speed, a schedule). Where neither is so, `Fault`
says why. Ranks of a job are started by `measure.py`.
"""

import contextlib
import ctypes
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
MANY_ROWS = 1536  # where a step is to compute much longer than Python takes around it
LONG = 100  # steps of an epoch whose data are ahead of it: what they are ahead by is little then
EPOCHS = 3  # the first one traces, the second one has no fault, the third one has
DELAY_S = 0.06  # each step, or as long as that all together
OTHERS_S = 60  # for what other ranks tell when all have trained


class Injected:
    """How long a fault has taken, by all threads together.

    Attributes:
        is_on: whether it delays anything; the epoch before shows what there is without it.
        delay_s: each time; longer than some steps, so that nothing can hide most of it.
        elsewhere_s: what is delayed so far where this object is not asked.
        turned_on: tells that place how long a delay is.
    """

    def __init__(self) -> None:
        self._done_s = 0.0
        self._under_way: dict[int, float] = {}  # by thread, when it began
        self._lock = threading.Lock()
        self.is_on, self.delay_s = False, DELAY_S
        self.elsewhere_s: Callable[[], float] = lambda: 0.0
        self.turned_on: Callable[[float], Any] = lambda delay_s: None

    def turn_on(self) -> None:
        """From now on, it delays."""
        self.is_on = True
        self.turned_on(self.delay_s)

    @property
    def seconds(self) -> float:
        """So far, with what is under way."""
        with self._lock:
            now_s = time.perf_counter()
            under_way_s = sum(now_s - began_s for began_s in self._under_way.values())
            return self._done_s + under_way_s + self.elsewhere_s()

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._under_way[thread] = time.perf_counter()
        yield
        with self._lock:
            self._done_s += time.perf_counter() - self._under_way.pop(thread)

    def sleep(self, times: float = 1) -> None:
        """Delays whoever calls it."""
        if self.is_on:
            with self.taking():
                time.sleep(times * self.delay_s)

    def compute(self, work: Callable[[], Any], times: float = 1) -> None:
        """Does some work again and again for as long as a delay takes."""
        if self.is_on:
            with self.taking():
                until = time.perf_counter() + times * self.delay_s
                while time.perf_counter() < until:
                    work()


_running = Injected()  # of this process, for layers, which know of no other


@dataclass(frozen=True)
class Told:
    """Of the last epoch.

    Attributes:
        took_s: by the fault, of all ranks.
        control: the record of the epoch before.
        record: of the last one.
    """

    took_s: float
    control: Any
    record: Any


def added(told: Told, category: str) -> float:
    """All that the fault took comes on top of what there was before."""
    return told.control.seconds[category] + told.took_s


def alone(told: Told, category: str) -> float:
    """Nothing else is of this category, but it is not nothing in the epoch before."""
    del category
    return told.took_s


def beside_the_step(told: Told, category: str) -> float:
    """Another thread is held up, ahead of the step, which hides as much as it takes itself."""
    control = told.control
    return told.took_s - (control.wall_s - control.seconds[category])


def of_a_later_rank(told: Told, category: str) -> float:
    """By how much it is later anyway comes on top; that the other one is, at times, is over."""
    del category
    before = told.control
    own_s = sum(before.seconds[name] for name in ("input", "compute", "host", "saving"))
    return told.took_s + own_s * (before.utilisation["rank 1"] / before.utilisation["rank 0"] - 1)


def of_the_schedule(told: Told, category: str) -> float:
    """Two equal stages, two microbatches: (p - 1) / (m + p - 1) of what a step's graph takes."""
    del category
    return _graph_s(told.record) * (2 - 1) / (2 + 2 - 1)


def of_uneven_stages(slower: float) -> Callable[[Told, str], float]:
    """What two stages leave idle, less what equal ones would, of what a step's graph takes.

    Args:
        slower: how much of what both sleep the slower one does; there are 8 microbatches.
    """
    makespan = slower + (1 - slower) / 8  # of what one device would take
    idle = 1 - 1 / (2 * makespan)
    return lambda told, category: _graph_s(told.record) * (idle - (2 - 1) / (8 + 2 - 1))


def of_100_mbit_per_s(told: Told, category: str) -> float:
    """What was sent, with 66 bytes of headers for each 1448, at the link's speed."""
    del category
    return told.record.details["bytes_sent"] * 8 / 100e6 * (1448 + 66) / 1448


def _graph_s(record: Any) -> float:
    return sum(record.seconds[name] for name in ("compute", "bubble", "imbalance"))


@dataclass
class Fault:
    """One training.

    Attributes:
        expected: the cause that `Measure` should name, or several that are as true.
        category: whose share should be that of the injected seconds; "" where it is not known.
        data: what `fit` is given, made of `Injected`.
        callbacks: beside `Measure`.
        model: compiled.
        options: of `fit`.
        seconds: that the category should have.
        unknown: why that is not known.
        is_always_on: also while a pipeline measures its stages, so that no epoch is without it.
    """

    expected: tuple[str, ...]
    category: str = ""
    data: Callable[[Injected], Any] | None = None
    callbacks: Callable[[Injected, Path], list] = lambda injected, folder: []
    model: Callable[[], keras.Model] | None = None
    options: dict = field(default_factory=dict)
    seconds: Callable[[Told, str], float] = added
    unknown: str = ""
    is_always_on: bool = False


def arrays(rows: int = STEPS * ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Random features and targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, WIDTH)).astype("float32")
    return x, x[:, :1].copy()


def batches(rows: int = ROWS) -> tf.data.Dataset:
    """Batches of them that are there at once."""
    pieces = [each.reshape(-1, rows, each.shape[-1]) for each in arrays(STEPS * rows)]
    return tf.data.Dataset.from_tensor_slices(tuple(pieces))


def dataset(rows: int = ROWS) -> tf.data.Dataset:
    """The same, with nothing read ahead of the step."""
    return nothing_ahead(batches(rows))


def many_rows(injected: Injected) -> tf.data.Dataset:
    """The same, of large batches."""
    return dataset(MANY_ROWS)


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
        injected.sleep(3)  # of which a step hides a small part: how much is not set
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
        self._injected.sleep(3)
        return tuple(each[index * ROWS : (index + 1) * ROWS] for each in self._arrays)


def slow_disk(injected: Injected) -> tf.data.Dataset:
    """Records of a file, each read at once, from a disk that waits before each: `slow_disk.c`."""
    path = Path(os.environ["MEASURE_FOLDER"]) / "records"
    batch = tf.io.serialize_tensor(np.ones((ROWS, WIDTH), "float32")).numpy()
    path.write_bytes(batch * STEPS)
    disk = ctypes.CDLL(None)
    disk.slow_disk_slept_s.restype = ctypes.c_double
    disk.slow_disk.argtypes = [ctypes.c_char_p, ctypes.c_double]
    injected.elsewhere_s = disk.slow_disk_slept_s
    injected.turned_on = lambda delay_s: disk.slow_disk(str(path).encode(), delay_s)
    records = tf.data.FixedLengthRecordDataset(str(path), len(batch), buffer_size=len(batch))

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
    one = tf.data.Dataset.range(1)
    return nothing_ahead(one.interleave(lambda _: slow_map(injected), cycle_length=1))


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
        self.injected.sleep(STEPS)

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


class TracesAgain(SleepsAtTheEnd):
    """Every third step; what is traced sleeps, as a large model takes its time.

    It sleeps much longer than Python takes to trace, which differs by a fifth from epoch to epoch.
    """

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        original = model.train_step

        def train_step(data: Any) -> Any:
            self.injected.sleep(10)
            return original(data)

        model.train_step = train_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch % 3 == 2:
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


def held_up(inputs: tf.Tensor, hold: Callable[[np.ndarray], None]) -> tf.Tensor:
    """`inputs`, after `hold` of their rows; the backward pass takes no time."""

    @tf.custom_gradient
    def held(x: tf.Tensor) -> tuple:
        def held_rows(rows: np.ndarray) -> np.ndarray:
            hold(rows)
            return rows

        return tf.ensure_shape(tf.numpy_function(held_rows, [x], x.dtype), x.shape), lambda dy: dy

    return held(inputs)


@keras.saving.register_keras_serializable("measure_causes")
class Slow(keras.layers.Layer):
    """A layer that sleeps, forward."""

    def call(self, inputs: Any) -> Any:
        return held_up(inputs, lambda rows: _running.sleep(0.5))


ROW_S = 0.002  # that a layer of this kind takes for a row


@keras.saving.register_keras_serializable("measure_causes")
class ByRow(keras.layers.Layer):
    """Sleeps forward, for each row, as on a device of its own: logical CPUs share their cores."""

    def call(self, inputs: Any) -> Any:
        return held_up(inputs, lambda rows: _running.sleep(len(rows) * ROW_S / _running.delay_s))


SLEEPING: dict[Any, type] = {"slow": Slow, "by row": ByRow}


def equal_stages(microbatches: int) -> keras.Model:
    """Two stages that sleep alike."""
    partition = [["first", "later_1"], ["later_2", "later_last"]]
    return pipeline([WIDTH, "by row", "by row"], microbatches=microbatches, partition=partition)


def four_layers(partition: Any) -> keras.Model:
    """Of two stages; each sleeps alike."""
    return pipeline([WIDTH, *["by row"] * 4], partition=partition)


def pipeline(widths: list, stages: int = 2, microbatches: int = 8, **options: Any) -> keras.Model:
    """Dense layers of these widths, and those of `SLEEPING`, on logical CPUs."""
    import tfparallel

    cpus = [f"CPU:{i}" for i in range(stages)]
    strategy = tfparallel.PipelineStrategy(cpus, num_microbatches=microbatches, **options)
    with strategy.scope():
        names = ["first", *(f"later_{i}" for i in range(1, len(widths)))]
        layers = [
            SLEEPING[width](name=name)
            if width in SLEEPING
            else keras.layers.Dense(width, "relu", name=name)
            for name, width in zip(names, widths, strict=True)
        ]
        last = keras.layers.Dense(1, name="later_last")
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, last])
        model.compile("sgd", "mse")
    return model


# ---- several ranks -------------------------------------------------------------------------------


def workers(**options: Any) -> keras.Model:
    """Replicas of `TF_CONFIG`."""
    import tfparallel

    strategy = tfparallel.MultiWorkerMirroredStrategy(**options)
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
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
    """Computes longer on the second rank.

    Behind a sleep the rest of its step would take longer, too: a core that wakes has cold caches.
    """

    def call(self, inputs: Any) -> Any:
        if rank() == 0:
            return inputs
        return held_up(inputs, lambda rows: _running.compute(lambda: None, times=0.5))


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
        ("input: map",),
        "",
        lambda i: slow_map(i, num_parallel_calls=2, deterministic=True),
        unknown="two threads sleep at once, beside steps: what is left to wait for is not set",
    ),
    "from_generator": Fault(("input: generator",), "input", slow_generator),
    "Python generator": Fault(
        ("input: generator", "input"),
        "input",
        endless,
        options={"steps_per_epoch": STEPS},
        seconds=beside_the_step,
    ),
    "PyDataset": Fault(("input: generator", "input"), "input", SlowFiles, seconds=beside_the_step),
    "disk": Fault(("input: files",), "input", slow_disk),
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
    "tiny batch": Fault(
        ("host: tiny batch",),
        "",
        tiny_batches,
        model=tiny_model,
        unknown="nothing is added: Keras takes for a step what it takes",
    ),
    "ModelCheckpoint": Fault(
        ("saving: ModelCheckpoint",), "saving", callbacks=checkpoints, seconds=alone
    ),
    "ModelCheckpoint, whole": Fault(
        ("saving: ModelCheckpoint",), "saving", callbacks=whole_models, seconds=alone
    ),
    "BackupAndRestore of Keras": Fault(
        ("saving: BackupAndRestore",), "saving", callbacks=keras_backups, seconds=alone
    ),
    "BackupAndRestore": Fault(
        ("saving: BackupAndRestore",), "saving", callbacks=backups, seconds=alone
    ),
    "retracing": Fault(("tracing: retracing",), "tracing", callbacks=_callback(TracesAgain)),
    "run_eagerly": Fault(
        ("run_eagerly",),
        "",
        model=lambda: plain_model(run_eagerly=True),
        unknown="it slows down computing itself, whose share it leaves as it is",
    ),
    "one thread": Fault(
        ("threads",),
        data=many_rows,
        unknown="it slows down computing itself, whose share it leaves as it is",
    ),
    "slow stage": Fault(
        ("imbalance: stage",),
        "imbalance",
        model=lambda: pipeline([WIDTH, "slow", WIDTH]),  # no partition divides a layer
        seconds=of_uneven_stages(1),
        is_always_on=True,
    ),
    "unbalanced partition": Fault(
        ("imbalance: stage",),
        "imbalance",
        model=lambda: four_layers([["first", "later_1"], ["later_[234]", "later_last"]]),
        seconds=of_uneven_stages(3 / 4),
        is_always_on=True,
    ),
    "few microbatches": Fault(
        ("bubble: schedule",),
        "bubble",
        model=lambda: equal_stages(2),
        seconds=of_the_schedule,
        is_always_on=True,
    ),
    "slow rank": Fault(
        ("imbalance: rank",),
        "imbalance",
        model=workers_with_a_slow_one,
        seconds=of_a_later_rank,
    ),
    "callback of one rank": Fault(
        ("imbalance: rank",),
        "imbalance",
        model=workers,
        callbacks=on_rank_1(SleepsAtTheEnd),
        seconds=of_a_later_rank,
    ),
    "data of one rank": Fault(
        ("imbalance: rank",),
        "imbalance",
        slow_map_on_rank_1,
        model=workers,
        seconds=of_a_later_rank,
    ),
    "link of 100 Mbit/s": Fault(
        ("communication: slow link",),
        "communication",
        model=workers,
        seconds=of_100_mbit_per_s,
    ),
}
OF_RANKS = ("slow rank", "callback of one rank", "data of one rank", "link of 100 Mbit/s")


class SleepsSometimes(SleepsAtTheEnd):
    """Of every twentieth batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch % 20 == 19:
            self.injected.sleep()


def seldom(injected: Injected, folder: Path) -> list:
    """Keras's, after 500 batches."""
    path = str(folder / "at.weights.h5")
    return [keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=500)]


def mapped_ahead(injected: Injected) -> tf.data.Dataset:
    """The slow map on 16 threads, ahead of the step, and of the next epoch."""

    def pause(x: np.ndarray) -> np.ndarray:
        injected.sleep()
        return x

    def paused(x: tf.Tensor, y: tf.Tensor) -> tuple:
        return tf.ensure_shape(tf.numpy_function(pause, [x], x.dtype), x.shape), y

    options = tf.data.Options()
    options.threading.private_threadpool_size = 16  # else there is a thread for each core
    return batches().repeat().map(paused, num_parallel_calls=16).prefetch(16).with_options(options)


# What helps, by the name of the fault.
CURED: dict[str, Fault] = {
    "map, one thread": Fault(("none",), "", mapped_ahead, options={"steps_per_epoch": LONG}),
    "callback sleeps at the end": Fault(("none",), "", callbacks=_callback(SleepsSometimes)),
    "tiny batch": Fault(
        ("none",),
        "",
        lambda injected: batches().repeat(),
        model=tiny_model,
        options={"steps_per_epoch": 300},
    ),
    "ModelCheckpoint": Fault(("none",), "", callbacks=seldom),
    "retracing": Fault(("none",)),
    "run_eagerly": Fault(("none",)),
    "one thread": Fault(("none",), data=many_rows),
    "few microbatches": Fault(("none",), "", model=lambda: equal_stages(8), is_always_on=True),
    "unbalanced partition": Fault(
        ("none",), "", model=lambda: four_layers("balanced"), is_always_on=True
    ),
    "data of one rank": Fault(("none",), "", model=workers),
    "link of 100 Mbit/s": Fault(("none",), "", model=lambda: workers(compression="power_sgd")),
}


HEALTHY: dict[str, Callable[[], tuple[keras.Model, Any]]] = {
    "arrays": lambda: (plain_model(), arrays(STEPS * MANY_ROWS)),
    "tf.data": lambda: (plain_model(), batches(MANY_ROWS)),
    "tf.data, prefetched": lambda: (plain_model(), batches(MANY_ROWS).prefetch(2)),
    "a cheap map": lambda: (plain_model(), batches(MANY_ROWS).map(lambda x, y: (x * 2, y))),
    "shuffled": lambda: (plain_model(), batches(MANY_ROWS).shuffle(8)),
    "adam": lambda: (_compiled("adam"), batches(MANY_ROWS)),
    "rmsprop": lambda: (_compiled("rmsprop"), batches(MANY_ROWS)),
    "one device": lambda: (_under("OneDeviceStrategy", "CPU:0"), batches(MANY_ROWS)),
    "mirrored": lambda: (_under("MirroredStrategy", 2), batches(MANY_ROWS)),
    "central storage": lambda: (
        _under("CentralStorageStrategy", ["CPU:0", "CPU:1"]),
        batches(MANY_ROWS),
    ),
}


def _compiled(optimizer: str) -> keras.Model:
    model = plain_model()
    model.compile(optimizer, "mse")
    return model


def _under(name: str, devices: Any) -> keras.Model:
    import tfparallel

    with getattr(tfparallel, name)(devices).scope():
        return plain_model()


def run(name: str, folder: Path, is_cured: bool = False) -> dict[str, Any]:
    """One training; what it injected and what `Measure` says of its last epoch."""
    global _running
    os.environ["MEASURE_FOLDER"] = str(folder)
    fault, injected = (CURED if is_cured else FAULTS)[name], Injected()
    _running, injected.is_on = injected, fault.is_always_on
    keras.utils.set_random_seed(0)
    model = (fault.model or plain_model)()
    ready = batches() if is_cured else dataset()
    data = ready if fault.data is None else fault.data(injected)
    callbacks = fault.callbacks(injected, folder)
    is_job = name in OF_RANKS
    return _measured(model, data, callbacks, injected, fault, folder if is_job else None)


def run_healthy(name: str) -> dict[str, Any]:
    """One training that nothing slows down."""
    model, data = HEALTHY[name]()
    return _measured(model, data, [], Injected(), Fault(("none",)))


def _measured(
    model: keras.Model,
    data: Any,
    callbacks: list,
    injected: Injected,
    fault: Fault,
    shared: Path | None = None,
) -> dict[str, Any]:
    from tfparallel.callbacks import Measure

    measure = Measure(verbose=0)
    marks: list[float] = []
    verdicts: list = []

    class Marks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == EPOCHS - 1:
                if not fault.is_always_on:
                    injected.delay_s = max(DELAY_S, 4 * measure.records[-1].step.median)
                injected.turn_on()
            marks.append(injected.seconds)

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            marks.append(injected.seconds)
            verdicts.append(measure.verdict)

    x, y = data if isinstance(data, tuple) else (data, None)
    batch = len(x) // STEPS if y is not None else None
    # Marks first: what others do at an epoch's beginning is of the epoch.
    model.fit(
        x,
        y,
        batch_size=batch,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[Marks(), *callbacks, measure, Reads()],
        **fault.options,
    )
    control, record = measure.records[-2:]
    took_s = _of_all_ranks(marks[-1] - marks[-2], shared)
    told = {
        "cause": verdicts[-1].cause,
        "text": verdicts[-1].text,
        "shares": record.shares,
        "seconds": dict(record.seconds),
        "steps": record.steps,
        "rows_per_s": record.rows_per_s,
        "wall_s": record.wall_s,
    }
    if not fault.category:
        return told
    told |= {"took_s": took_s, "control": dict(control.seconds), "control_s": control.wall_s}
    expected_s = fault.seconds(Told(took_s, control, record), fault.category)
    off_s = record.seconds[fault.category] - expected_s
    return told | {"injected": expected_s / record.wall_s, "off": off_s / record.wall_s}


def _of_all_ranks(took_s: float, shared: Path | None) -> float:
    """What the faults of all ranks took; the second one has them."""
    if shared is None:
        return took_s
    partial, path = shared / f"partial-{rank()}", shared / f"took-{rank()}"
    partial.write_text(str(took_s))
    partial.rename(path)
    until = time.monotonic() + OTHERS_S
    while len(found := sorted(shared.glob("took-*"))) < 2:
        if time.monotonic() > until:
            raise TimeoutError(f"Expected what 2 ranks took within {OTHERS_S} s. Found: {found}.")
        time.sleep(0.05)
    return sum(float(each.read_text()) for each in found)


def open_cpus(count: int) -> None:
    """Logical devices, before TensorFlow starts."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * count,
    )


def main(name: str, folder: str, cured: str = "") -> None:
    """Prints one line of JSON."""
    is_healthy = name in HEALTHY
    found = run_healthy(name) if is_healthy else run(name, Path(folder), bool(cured))
    if rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    if name not in OF_RANKS:
        os._exit(0)  # data without end, and a pipe that nobody writes to, are not waited for


if __name__ == "__main__":
    open_cpus(int(os.environ.get("MEASURE_CPUS", "2")))
    main(*sys.argv[1:])
