"""Trains in processes that share the state, beside a pipeline or an axis of the model in each."""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.helpers import assert_same_training, in_float64, open_logical_cpus, tiny_data, train
from tests.hybrid.matrix_of_shares import check, strategy_of
from tests.hybrid.models_of_matrix import plain
from tests.multi_process.answering import answer_requests


def answer(kind: str, **request) -> dict:
    """What a process replies to a request of this kind: a function below."""
    return _KINDS[kind](**request) or {}


def _cell(folder: str, cell: list[str]) -> None:
    check(folder, *cell)


def _trained(strategy, **options):
    return train(strategy, build=plain, data=tiny_data, rows=13, batch_size=5, **options)


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


def _stored(sizes: dict[str, int], shard: str, transport: str = "auto") -> dict:
    """Trains as one device; replies with what this process stores, as shares of the whole."""
    with in_float64():
        candidate = _new(sizes, shard, transport)
        keras.backend.clear_session()
        assert_same_training(_trained(None, optimizer=_adam), candidate, atol=1e-9)
    weights, slots = candidate.model.trainable_weights, candidate.model.optimizer.variables[2:]
    return {"weights": _share(weights), "slots": _share(slots)}


def _new(sizes: dict[str, int], shard: str = "gradients", transport: str = "auto", **options):
    keras.backend.clear_session()  # layouts go by the numbers in layers' names
    strategy = strategy_of(sizes, "plain", None, shard, transport)
    return _trained(strategy, optimizer=_adam, **options)


def _share(variables: list[keras.Variable]) -> float:
    """What this process has of variables, each number once."""
    every = {id(x): x for v in variables for x in _copies(v)}
    stored = sum(x.shape.num_elements() for x in every.values())
    return stored / sum(int(tf.size(v)) for v in variables)


def _copies(variable: keras.Variable) -> list[tf.Variable]:
    behind = variable.value
    return tf.nest.flatten(list(getattr(behind, "parts", None) or behind.values))


def _files(folder: str, sizes: dict[str, int]) -> None:
    """What is saved is loaded on one device, and in processes that share the state again."""
    model, strategy = _new(sizes).model, strategy_of(sizes, "plain", None)
    path = f"{folder}-{os.getpid()}.keras"
    model.save(path)
    checkpoint = tf.train.Checkpoint(model=model).write(path + "-checkpoint")
    expected = _numbers(model)
    loaded = [keras.saving.load_model(path)]
    with strategy.scope():
        loaded.append(keras.saving.load_model(path))
        restored = keras.saving.load_model(path)
        restored.optimizer.learning_rate = 1.0
        for variable in restored.variables + restored.optimizer.variables[2:]:
            variable.assign(tf.zeros_like(variable))
        tf.train.Checkpoint(model=restored).read(checkpoint).assert_consumed()
    for other in (*loaded, restored):
        for mine, theirs in zip(expected, _numbers(other), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    x, _ = tiny_data(7)
    for other in (*loaded, restored):
        np.testing.assert_allclose(model.predict(x, verbose=0), other.predict(x, verbose=0), 1e-5)


def _numbers(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in model.variables + model.optimizer.variables]


def _lost(sizes: dict[str, int], rank: int) -> None:
    """A process ends in its second batch; the other says so."""
    own = _rank()

    def end(batch, logs=None):
        if batch == 1 and own == rank:
            os._exit(1)

    _new(sizes, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=end)])
    raise AssertionError("The training has gone on.")


def _differs(in_what: str) -> dict:
    """A process has another mesh, or another layout: replies with what it is told."""
    first = _rank() == 0
    sizes = {"shard": 2, "model": 2} if first or in_what == "layout" else {"data": 2, "model": 2}
    layout = keras.distribution.LayoutMap(None)
    layout[".*kernel"] = (None, "model") if first or in_what == "mesh" else ("model", None)
    shard = tfparallel.Sharding("gradients") if "shard" in sizes else None
    try:
        tfparallel.HybridStrategy(sizes, layout_map=layout, shard=shard, transport="auto")
    except Exception as error:
        return {"told": str(error)}
    return {"told": ""}


def _refused(optimizer: str) -> dict:
    """Replies with why an optimizer, or a constraint, cannot be."""
    make = getattr(keras.optimizers, optimizer)
    keras.backend.clear_session()
    try:
        _trained(strategy_of({"shard": 2, "model": 2}, "plain", None), optimizer=make)
    except NotImplementedError as error:
        return {"told": str(error)}
    return {"told": ""}


def _rank() -> int:
    """Of this process, among the workers of `TF_CONFIG`."""
    return tf.distribute.cluster_resolver.TFConfigClusterResolver().task_id


_KINDS = {
    "cell": _cell,
    "stored": _stored,
    "files": _files,
    "lost": _lost,
    "differs": _differs,
    "refused": _refused,
}

if __name__ == "__main__":
    count = int(sys.argv[1])
    answer_requests(answer, lambda: open_logical_cpus(count))
