"""Programs of a chief whose other stages are processes of their own.

A case returns what its test looks at; it is printed as one line of JSON. The servers are forked
from a process that has not started TensorFlow.
"""

import collections
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfparallel
from tests.helpers import (
    Training,
    momentum_sgd,
    open_logical_cpus,
    tiny_compile_options,
    tiny_data,
    train,
)
from tests.parameter_server.cluster import SERVERS, ServerProcesses
from tests.parameter_server.spawner import Spawner
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.internals import context
from tfparallel.pipeline.remote_stages import StageLost

CASES: dict[str, Callable] = {}
_STAGE_S = 4.0  # much longer than any process of a test is kept from answering


def case(function: Callable) -> Callable:
    """Registers a case."""
    CASES[function.__name__] = function
    return function


def make_cluster(num_stages: int) -> ServerProcesses:
    """Starts the processes of all stages but the first."""
    servers = ServerProcesses(num_stages - 1, 0, Spawner(SERVERS, by_fork=True))
    os.environ.update(servers.environment("chief", 0))
    _alive.append(servers)  # they die with the last reference to their spawner
    return servers


_alive: list[ServerProcesses] = []


def deep_model() -> keras.Model:
    """Six layers, with connections that skip some of them."""
    x = inputs = keras.Input((6,))
    skipped = []
    for i in range(2):
        x = layers.Dense(7, activation="tanh", name=f"down_{i}")(x)
        skipped.append(x)
    for i in range(2):
        x = layers.Add(name=f"join_{i}")([x, skipped.pop()])
        x = layers.Dense(7, activation="tanh", name=f"up_{i}")(x)
    return keras.Model(inputs, layers.Dense(3, name="scores")(x))


def batch_norm_model() -> keras.Model:
    """BatchNorm on the last stage."""
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(3)]
    )


def dropout_model() -> keras.Model:
    """Dropout on the last stage."""
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5), layers.Dropout(0.5), layers.Dense(3)]
    )


def difference(expected: Training, received: Training) -> float:
    """The largest difference of weights, optimizer variables and logs."""
    ours, theirs = received.results(), expected.results()
    assert sorted(ours) == sorted(theirs)
    return max(
        float(np.max(np.abs(np.asarray(ours[name], "float64") - np.asarray(theirs[name]))))
        for name in ours
    )


@case
def two_stages() -> dict:
    """Models on a chief and a worker, against one device and against a pipeline of one process."""
    open_logical_cpus(2)
    make_cluster(2)
    strategy = tfparallel.PipelineStrategy(num_microbatches=4)
    here = tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=4)
    deep = train(strategy, deep_model)
    rows = {"rows": 24, "batch_size": 12}
    accumulating = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=4)
    accumulated = train(
        None, batch_norm_model, rows=24, batch_size=3, optimizer=lambda: accumulating
    )
    with_statistics = train(strategy, batch_norm_model, **rows)
    # The last batch has fewer rows than there are microbatches.
    few = {"rows": 10, "batch_size": 7, "sample_weight": np.linspace(0.5, 2.0, 10)}
    pairs = zip(accumulated.model.get_weights(), with_statistics.model.get_weights(), strict=True)
    return {
        "skip_connections": difference(train(None, deep_model), deep),
        "batch_norm": max(float(np.abs(a - b).max()) for a, b in pairs),
        "sample_weight": difference(
            train(None, deep_model, **few), train(strategy, deep_model, **few)
        ),
        "dropout": difference(train(here, dropout_model), train(strategy, dropout_model)),
        "devices": [weight.value.values[0].device for weight in deep.model.weights],
        "slots": [v.value.values[0].device for v in deep.model.optimizer.variables[2:]],
        "metrics": [v.value.values[0].device for v in deep.model.metrics_variables],
        "summary": str(strategy.summary(deep.model)),
    }


@case
def three_stages() -> dict:
    """On a chief and two workers; which processes tensors go to."""
    make_cluster(3)
    stages = [["down_*"], ["join_0", "up_0"], ["join_1", "up_1", "scores"]]
    strategy = tfparallel.PipelineStrategy(
        num_microbatches=4, schedule="zero_bubble", partition=stages
    )
    piped = train(strategy, deep_model)
    return {
        "difference": difference(train(None, deep_model), piped),
        "links": sorted(_links(strategy)),
        "beside_activations": _beside_activations(strategy),
    }


@case
def one_thread() -> dict:
    """Processes of one thread each; what their servers are told of threads without work."""
    os.environ["TF_NUM_INTRAOP_THREADS"] = "1"
    make_cluster(2)
    strategy = tfparallel.PipelineStrategy(num_microbatches=4)
    piped = train(strategy, deep_model)
    sent = context.context().get_server_def().default_session_config
    return {
        "difference": difference(train(None, deep_model), piped),
        "may_spin": not sent.experimental.disable_thread_spinning,
    }


def _links(strategy: tf.distribute.Strategy) -> set:
    """Pairs of tasks: one makes an activation or a gradient, and another one takes it."""
    sent = _sent(strategy, *(tf.constant(array) for array in tiny_data(8)))
    return {
        (source, target)
        for x, source, target in sent
        if x.dtype == tf.float32 and x.shape.rank == 2 and source and target
    }


def _beside_activations(strategy: tf.distribute.Strategy) -> dict:
    """For batches of any number of rows: how many other tensors the chief sends to the last stage.

    Returns:
        The number by the type of the operation that makes them.
    """
    x, y = (tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in tiny_data(8))
    sent = _sent(strategy, x, y, tf.TensorSpec([None]))
    own = {x.ref(): x for x, source, target in sent if source in ("", "chief 0") and "1" in target}
    makers = collections.Counter(x.op.type for x in own.values() if x.dtype != tf.resource)
    # A reading without a device is where its variable is.
    return {k: v for k, v in makers.items() if k not in ("RemoteCall", "ReadVariableOp")}


def _sent(strategy: tf.distribute.Strategy, *batch: tf.Tensor | tf.TensorSpec) -> list[tuple]:
    """Tensors of a step that a task makes and another one takes, with both."""
    with strategy.scope():
        model = deep_model()
        model.compile(momentum_sgd(), **tiny_compile_options())
        model.optimizer.build(model.trainable_variables)
        model._symbolic_build(data_batch=(*batch, None)[:3])
        step = tf.function(lambda *batch: strategy.run(model.train_step, args=(batch,)))
        operations = step.get_concrete_function(*batch).graph.get_operations()
    edges = [(x, _task(x.op), _task(op)) for op in operations for x in op.inputs]
    return [(x, source, target) for x, source, target in edges if source != target]


def _task(operation: tf.Operation) -> str:
    spec = tf.DeviceSpec.from_string(operation.device)
    return f"{spec.job} {spec.task}" if spec.job else ""


@case
def files_and_forward_passes() -> dict:
    """evaluate, predict, files and `profile`."""
    make_cluster(2)
    folder = os.environ["CASE_FOLDER"]
    strategy = tfparallel.PipelineStrategy(num_microbatches=3)
    piped, alone = train(strategy, deep_model), train(None, deep_model)
    x, y = tiny_data(11)
    piped.model.save(f"{folder}/model.keras")
    path = tf.train.Checkpoint(model=piped.model).write(f"{folder}/checkpoint")
    with strategy.scope():
        loaded = keras.models.load_model(f"{folder}/model.keras")
    fresh = deep_model()
    tf.train.Checkpoint(model=fresh).read(path)
    loaded.fit(x, y, batch_size=11, verbose=0)
    alone.model.fit(x, y, batch_size=11, verbose=0)
    models = {"loaded": (alone.model, loaded), "checkpoint": (piped.model, fresh)}
    differences = {
        name: max(
            float(np.abs(a - b).max())
            for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
        )
        for name, (one, other) in models.items()
    }
    expected, received = (each.evaluate(x, y, verbose=0) for each in (alone.model, loaded))
    predicted = [each.predict(x, batch_size=5, verbose=0) for each in (alone.model, loaded)]
    before = loaded.get_weights()
    swimlane = strategy.profile(loaded, (x, y))
    return {
        **differences,
        "evaluate": float(np.abs(np.subtract(expected, received)).max()),
        "predict": float(np.abs(predicted[0] - predicted[1]).max()),
        "swimlane": str(swimlane),
        "unchanged": all(
            np.array_equal(a, b) for a, b in zip(before, loaded.get_weights(), strict=True)
        ),
    }


class Interrupt(keras.callbacks.Callback):
    """Ends the training in the middle of its second epoch."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Notes the epoch."""
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Raises."""
        if self.epoch == 1:
            raise InterruptedError


@case
def resumes() -> dict:
    """A training that ended in its second epoch of three goes on, from its backup."""
    make_cluster(2)
    strategy = tfparallel.PipelineStrategy(num_microbatches=3)
    folder = f"{os.environ['CASE_FOLDER']}/backup"
    backup = tfparallel.callbacks.BackupAndRestore(folder, asynchronous=False)
    options: dict = {"build": deep_model, "epochs": 3}
    with contextlib.suppress(InterruptedError):
        train(strategy, **options, callbacks=[backup, Interrupt()])
    backup = tfparallel.callbacks.BackupAndRestore(folder)
    epochs: list[int] = []
    noting = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: epochs.append(epoch))
    resumed = train(strategy, **options, callbacks=[backup, noting])
    alone = train(None, **options)
    pairs = zip(alone.model.get_weights(), resumed.model.get_weights(), strict=True)
    return {
        "epochs": epochs,
        "difference": max(float(np.abs(a - b).max()) for a, b in pairs),
    }


class Slow(layers.Layer):
    """Sleeps in small pieces, where it is computed."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """`[rows, width]` to the same, after about a second."""

        def multiply(i: tf.Tensor, y: tf.Tensor) -> tuple:
            return i + 1, tf.linalg.matmul(y, y)

        _, y = tf.while_loop(
            lambda i, _: i < 60, multiply, (0, tf.ones([300, 300]) / 300), parallel_iterations=1
        )
        return x + tf.stop_gradient(y[0, 0]) * 0


def _loses_a_stage(lose: Callable[[ServerProcesses], None]) -> dict:
    """Trains, loses the process of stage 1 of 3 in a step of a second, and tells how that ends."""
    servers = make_cluster(3)
    strategy = tfparallel.PipelineStrategy(num_microbatches=3, timeouts=Timeouts(stage_s=_STAGE_S))
    with strategy.scope():
        x = inputs = keras.Input((6,))
        for i in range(3):
            with strategy.stage(i):
                x = layers.Dense(6)(Slow()(x) if i == 1 else x)
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
    x = np.ones((6, 6), "float32")
    model.train_on_batch(x, x)
    batches = tf.data.Dataset.from_tensors((x, x)).repeat(10_000)
    lost_s: list[float] = []

    def lose_soon() -> None:
        time.sleep(0.5)
        lost_s.append(time.monotonic())
        lose(servers)

    thread = threading.Thread(target=lose_soon, daemon=True)
    soon = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 0 and thread.start()
    )
    try:
        model.fit(batches, verbose=0, callbacks=[soon])
    except StageLost as error:
        after_s = time.monotonic() - lost_s[0]
        local = float(tf.reduce_sum(tf.ones([3])))
        (address,) = servers.cluster["worker"][:1]
        return {"error": str(error), "after_s": after_s, "address": address, "local": local}
    raise AssertionError("fit ended as if nothing had happened")


@case
def stage_is_killed() -> dict:
    """`kill -9` in the middle of a step."""
    return _loses_a_stage(lambda servers: servers.kill("worker", 0))


@case
def stage_is_stopped() -> dict:
    """SIGSTOP in the middle of a step."""
    return _loses_a_stage(lambda servers: servers.stop("worker", 0))


@case
def stage_is_stopped_while_a_step_is_traced() -> dict:
    """SIGSTOP by a layer that is called to be traced: TensorFlow then waits with Python's lock."""
    servers = make_cluster(2)
    strategy = tfparallel.PipelineStrategy(num_microbatches=2, timeouts=Timeouts(stage_s=_STAGE_S))
    stopped_s: list[float] = []

    class Stops(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            if strategy_is_training and not stopped_s:
                stopped_s.append(time.monotonic())
                servers.stop("worker", 0)
            return x

    strategy_is_training = False
    with strategy.scope():
        x = inputs = keras.Input((6,))
        for i in range(2):
            with strategy.stage(i):
                x = layers.Dense(6)(Stops()(x))
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
    strategy_is_training = True
    x = np.ones((6, 6), "float32")
    try:
        model.fit(x, x, verbose=0)
    except StageLost as error:
        return {
            "error": str(error),
            "after_s": time.monotonic() - stopped_s[0],
            "address": servers.cluster["worker"][0],
            "local": float(tf.reduce_sum(tf.ones([3]))),
        }
    raise AssertionError("fit ended as if nothing had happened")


def main() -> None:
    """Runs the case that `CHIEF_CASE` names."""
    print("RESULT", json.dumps(CASES[os.environ["CHIEF_CASE"]]()), flush=True)
