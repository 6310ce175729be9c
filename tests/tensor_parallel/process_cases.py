"""Programs of a chief that trains with the devices of other processes.

A case returns what its test looks at, printed as one line of JSON.
"""

import json
import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfparallel
from tests import helpers
from tests.parameter_server.cluster import ServerProcesses
from tests.remote_pipeline.cases import difference, make_cluster
from tests.tensor_parallel import test_training
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.pipeline.remote_stages import StageLost

CASES: dict = {}


def _case(function):
    CASES[function.__name__] = function
    return function


def _strategy(layout="auto", processes=2, **options) -> tfparallel.TensorParallelStrategy:
    make_cluster(processes)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tfparallel.TensorParallelStrategy(layout, cluster_resolver=resolver, **options)


def _small_model():
    inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh", name="up")(inputs)
    x = layers.Dropout(0.3, seed=1)(layers.BatchNormalization(name="norm")(x))
    x = layers.Dense(6, name="down")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Add()([x, inputs])))


def _mesh(parts=2):
    devices = [f"cpu:{i}" for i in range(parts)]
    return keras.distribution.DeviceMesh((1, parts), ("batch", "model"), devices)


@_case
def a_layout_map() -> dict:
    """A column and a row with BatchNorm and Dropout between them; saving, and `predict`."""
    layout = keras.distribution.LayoutMap(_mesh())
    layout[".*up/kernel"] = (None, "model")
    layout[".*down/kernel"] = ("model", None)
    strategy = _strategy(layout)
    candidate = helpers.train(strategy, build=_small_model)
    one_device = helpers.train(None, build=_small_model)
    folder = os.environ["CASE_FOLDER"]
    candidate.model.save(f"{folder}/model.keras")
    loaded = keras.saving.load_model(f"{folder}/model.keras")
    x, _ = helpers.tiny_data(5)
    predicted = candidate.model.predict(x, verbose=0)
    return {
        "name": repr(strategy),
        "axes": str(strategy.summary(candidate.model)).splitlines()[-1],
        "difference": difference(one_device, candidate),
        "loaded": float(np.abs(loaded.predict(x, verbose=0) - predicted).max()),
        "devices": [p.device for p in candidate.model.get_layer("up").kernel.value.parts[0]],
    }


@_case
def a_transformer_of_three_processes() -> dict:
    """A layout that is found, an Embedding in parts, a clipped norm, positions in parts."""
    strategy = _strategy(processes=3, sequence_parallel=True)
    options = {
        "build": test_training._transformer,
        "data": test_training._tokens,
        "optimizer": test_training._adamw,
    }
    candidate = helpers.train(strategy, **options)
    return {"difference": difference(helpers.train(None, **options), candidate)}


@_case
def an_rnn_and_branches() -> dict:
    """An LSTM by units, and one of each direction on a process of its own."""

    def data(rows):
        rng = np.random.default_rng(0)
        return rng.normal(size=(rows, 5, 3)).astype("float32"), rng.integers(0, 3, rows)

    def build():
        x = keras.Input((5, 3))
        heads = [layers.LSTM(4, go_backwards=bool(i), name=f"lstm{i}")(x) for i in range(2)]
        return keras.Model(x, layers.Dense(3)(layers.Average()(heads)))

    by_units = _strategy()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    in_branches = tfparallel.TensorParallelStrategy("branches", cluster_resolver=resolver)
    one_device = helpers.train(None, build=build, data=data)
    return {
        name: difference(one_device, helpers.train(strategy, build=build, data=data))
        for name, strategy in (("units", by_units), ("branches", in_branches))
    }


@_case
def trained_before_it_is_connected() -> dict:
    """Functions of before are let go of later; a variable of before is refused, and no one waits.

    The second process of that cluster does not exist.
    """
    helpers.train(None, build=_small_model)
    variable = tf.Variable(1.0, name="mine")
    config = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}}
    os.environ["TF_CONFIG"] = json.dumps({**config, "task": {"type": "worker", "index": 0}})
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        tfparallel.TensorParallelStrategy("auto", cluster_resolver=resolver)
    except RuntimeError as error:
        refused = str(error)
    del variable
    kept = tf.function(lambda x: x + 1)
    kept(tf.constant(1.0))
    strategy = _strategy()
    del kept
    candidate = helpers.train(strategy, build=_small_model)
    one_device = helpers.train(None, build=_small_model)
    return {"refused": refused, "difference": difference(one_device, candidate)}


@_case
def a_process_is_killed() -> dict:
    """In the middle of an epoch."""
    servers: ServerProcesses = make_cluster(2)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tfparallel.TensorParallelStrategy(
        "auto", cluster_resolver=resolver, timeouts=Timeouts(stage_s=4.0)
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(6)])
        model.compile("sgd", "mse")
    x = np.ones((12, 6), "float32")
    model.fit(x, x, verbose=0)
    kill = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 2 and servers.kill("worker", 0)
    )
    try:
        model.fit(x, x, batch_size=1, epochs=5, verbose=0, callbacks=[kill])
    except StageLost as error:
        return {"error": str(error)}
    raise AssertionError("fit ended as if nothing had happened")


def main() -> None:
    """Runs the case that `CHIEF_CASE` names."""
    print("RESULT", json.dumps(CASES[os.environ["CHIEF_CASE"]]()), flush=True)
