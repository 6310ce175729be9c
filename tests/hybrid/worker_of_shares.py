"""Trains in processes that share the state, beside a pipeline or an axis of the model in each."""

import contextlib
import gc
import itertools
import os
import sys
import time
import unittest.mock
from collections.abc import Iterable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import assert_same_training, in_float64, open_logical_cpus, tiny_data, train
from tests.hybrid.matrix_of_shares import check, strategy_of
from tests.hybrid.models_of_matrix import plain
from tests.multi_process.answering import answer_requests
from tfparallel.communication.ring import Ring
from tfparallel.internals import ResourceVariable


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
    keras.backend.clear_session()
    gc.collect()
    before = _numbers_here()
    with in_float64():
        candidate = _new(sizes, shard, transport)
        gc.collect()
        held = _numbers_here() - before
        keras.backend.clear_session()
        expected = _trained(None, optimizer=_adam)
        assert_same_training(expected, candidate, atol=1e-9)
        x, y = tiny_data(7)
        for ask in (lambda m: m.predict(x, verbose=0), lambda m: m.evaluate(x, y, verbose=0)):
            np.testing.assert_allclose(ask(candidate.model), ask(expected.model), 1e-9)
    summary = str(candidate.model.distribute_strategy.summary(candidate.model))
    assert "Axis 'shard' (2) crosses 2 processes" in summary
    weights, slots = candidate.model.trainable_weights, candidate.model.optimizer.variables[2:]
    whole = sum(int(tf.size(v)) for v in [*weights, *slots])
    return {"weights": _share(weights), "slots": _share(slots), "held": held / whole}


def _numbers_here() -> int:
    """How many numbers there are now in floating variables of this process."""
    every = [x for x in gc.get_objects() if isinstance(x, ResourceVariable)]
    values = [x.read_value() for x in every if x.dtype.is_floating]
    return sum(value.shape.num_elements() for value in values)


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


def _on_host(sizes: dict[str, int], name: str, transport: str = "auto", **sharding) -> dict:
    """Trains as one device; replies with the devices of what updates a kernel, and of its slots.

    Args:
        name: of the training, in `_ON_HOST`.
        sharding: `shard` and `host`.
    """
    options = {"data": tiny_data, "rows": 13, "batch_size": 5, "build": plain, **_ON_HOST[name]}
    with in_float64():
        keras.backend.clear_session()
        strategy = strategy_of(sizes, "plain", None, transport=transport, **sharding)
        candidate = train(strategy, **options)
        keras.backend.clear_session()
        assert_same_training(train(None, **options), candidate, atol=1e-9)
    kernels = [v for v in candidate.model.trainable_weights if v.path.endswith("kernel")]
    updated = [x for v in kernels for x in v.value._pieces_of(v.value.parts[0])]
    slots = [v for v in candidate.model.optimizer.variables if len(v.shape) == 2]
    return {
        "updated": _numbers_of_devices(updated),
        "slots": _numbers_of_devices([x for v in slots for x in _copies(v)]),
    }


def _numbers_of_devices(variables: Iterable) -> list[int]:
    specs = [tf.DeviceSpec.from_string(x.device) for x in variables]
    return sorted({spec.device_index for spec in specs})


def _ended(sizes: dict[str, int]) -> dict:
    """Replies with the gathers of an epoch whose length is known, and of one where it is not.

    And with those of three steps of a loop, and of one that goes on until its data have ended.
    """
    counts, batch = [], tiny_data(4)
    model = _new(sizes, "parameters").model
    known = tf.data.Dataset.from_tensors(batch).repeat(3)
    unknown = known.filter(lambda x, y: True)
    model.fit(known, verbose=0)
    three, all_of_them = range(3), itertools.count()
    for run in (
        lambda: model.fit(known, verbose=0),
        lambda: model.fit(unknown, verbose=0),
        lambda: _predicted(model, known, three),
        lambda: _predicted(model, known, all_of_them),
    ):
        with _counted_gathers() as calls:
            run()
        counts.append(len(calls))
    return dict(zip(("known", "unknown", "three steps", "to the end"), counts, strict=True))


def _predicted(model: keras.Model, data: tf.data.Dataset, steps: Iterable[int]) -> None:
    """Steps that take batches in their graph, until there is none; that is known late."""

    def batches() -> Iterator:
        yield from data
        time.sleep(0.5)

    iterator = iter(tf.data.Dataset.from_generator(batches, output_signature=data.element_spec))

    @tf.function
    def step() -> None:
        model.distribute_strategy.run(lambda x, y: model(x), args=iterator.get_next())

    with contextlib.suppress(tf.errors.OutOfRangeError):
        for _ in steps:
            step()


@contextlib.contextmanager
def _counted_gathers() -> Iterator[list]:
    """Gives a list that gets longer with each gather of the ring."""
    calls, gather = [], Ring.all_gather_each

    def counted(ring, arrays):
        calls.append(len(arrays))
        return gather(ring, arrays)

    with unittest.mock.patch.object(Ring, "all_gather_each", counted):
        yield calls


def _files(folder: str, sizes: dict[str, int], shard: str) -> None:
    """What is saved is loaded on one device, and in processes that share the state again."""
    model, strategy = _new(sizes, shard).model, strategy_of(sizes, "plain", None, shard)
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


def _constrained() -> keras.Model:
    """Of a kernel that grows to the largest norm that it may have."""
    x = keras.Input((6,))
    y = keras.layers.Dense(8, "tanh", name="dense_0")(x)
    y = keras.layers.Dense(8, kernel_constraint="max_norm", name="dense_1")(y)
    return keras.Model(x, keras.layers.Dense(3, name="dense_3")(y))


_WHOLE = {
    "Lamb": {"optimizer": lambda: keras.optimizers.Lamb(0.01)},
    "Muon": {"optimizer": lambda: keras.optimizers.Muon(0.01)},
    "Adafactor": {"optimizer": lambda: keras.optimizers.Adafactor(0.01)},
    "accumulated": {
        "optimizer": lambda: keras.optimizers.Lamb(
            0.01, gradient_accumulation_steps=2, global_clipnorm=0.1
        )
    },
    "averaged": {
        "optimizer": lambda: keras.optimizers.Lamb(
            0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
        )
    },
    "scaled": {
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb(0.01), 64.0)
    },
    "a constraint": {"optimizer": lambda: keras.optimizers.Adam(0.3), "build": _constrained},
}


_ON_HOST = {
    "clipped and averaged": {
        "optimizer": lambda: keras.optimizers.AdamW(
            0.01, weight_decay=0.1, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
        )
    },
    "accumulated": {
        "optimizer": lambda: keras.optimizers.Adam(
            0.01, gradient_accumulation_steps=2, global_clipnorm=0.1
        )
    },
    "scaled": {
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 64.0)
    },
    "of the whole": {"optimizer": lambda: keras.optimizers.Lamb(0.01)},
}


def _whole(
    sizes: dict[str, int], name: str, shard: str = "gradients", transport: str = "auto"
) -> dict:
    """Whole weights are updated as on one device; replies with what is stored of the slots."""
    options = {"data": tiny_data, "rows": 10, "batch_size": 5, "build": plain, **_WHOLE[name]}
    with in_float64():
        keras.backend.clear_session()
        candidate = train(strategy_of(sizes, "plain", None, shard, transport), **options)
        keras.backend.clear_session()
        assert_same_training(train(None, **options), candidate, atol=1e-9)
    if name == "a constraint":
        kernel = candidate.model.get_layer("dense_1").kernel
        assert np.linalg.norm(kernel.numpy(), axis=0).max() == pytest.approx(2)
    return {"slots": _share([v for v in candidate.model.optimizer.variables if len(v.shape) == 2])}


def _loop(sizes: dict[str, int], shard: str) -> dict:
    """Steps of one's own train as on one device, if `run` is given the rows of each process.

    Replies with what is told who has rows divided.
    """
    with in_float64():
        keras.backend.clear_session()
        strategy = strategy_of(sizes, "plain", None, shard)
        received = _own_steps(strategy)
        keras.backend.clear_session()
        for mine, theirs in zip(_own_steps(None), received, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    try:
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    except NotImplementedError as error:
        return {"told": str(error)}
    return {"told": ""}


def _own_steps(strategy: tfparallel.HybridStrategy | None) -> list[np.ndarray]:
    """Weights and slots behind steps of eight rows, some in Python and some in a graph."""
    x, y = tiny_data(8)
    shares = 1
    if strategy is not None:
        x, y = (np.split(each, 2)[_rank()] for each in (x, y))
        shares = strategy.num_replicas_in_sync // 2  # replicas of a process get the same rows
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, optimizer = plain(), _adam()
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, scores, from_logits=True)
            loss = tf.reduce_sum(losses) / (8 * shares)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    def steps(x, y):
        return step(x, y) if strategy is None else strategy.run(step, args=(x, y))

    x = tf.constant(x, "float64")
    for each in (steps, tf.function(steps)):
        for _ in range(2):
            each(x, tf.constant(y))
    return [v.numpy() for v in model.variables + optimizer.variables]


class _Halved(keras.layers.Dense):
    """Assigns its own weight."""

    def call(self, x):
        self.kernel.assign(self.kernel / 2)
        return super().call(x)


def _assigned(sizes: dict[str, int]) -> dict:
    """Replies with why a layer cannot assign its own weight."""

    def build():
        return keras.Sequential([keras.Input((6,)), _Halved(4, name="own"), keras.layers.Dense(3)])

    keras.backend.clear_session()
    try:
        train(strategy_of(sizes, "plain", None), build=build)
    except ValueError as error:
        return {"told": str(error)}
    return {"told": ""}


def _overflow(sizes: dict[str, int]) -> None:
    """Gradients of some rows of a kernel overflow: steps are skipped, by both processes."""

    def data(rows):
        x, y = tiny_data(rows)
        return x * np.array([100, 1, 1, 1, 1, 1], x.dtype), y

    def build():
        stack = [keras.layers.Dense(8, "relu", name="dense_0"), keras.layers.Dense(3, name="dense")]
        return keras.Sequential([keras.Input((6,)), *stack])

    def scaled():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1e-4), initial_scale=2.0**125, dynamic_growth_steps=100
        )

    options = {"build": build, "data": data, "rows": 26, "batch_size": 5, "optimizer": scaled}
    keras.backend.clear_session()
    candidate = train(strategy_of(sizes, "plain", None), **options)
    keras.backend.clear_session()
    expected = train(None, **options)
    halved = 2.0**125 / float(expected.model.optimizer.dynamic_scale)
    assert 1 < halved < 2**12, halved  # some of the twelve steps were skipped
    assert_same_training(expected, candidate)


def _rank() -> int:
    """Of this process, among the workers of `TF_CONFIG`."""
    return tf.distribute.cluster_resolver.TFConfigClusterResolver().task_id


_KINDS = {
    "cell": _cell,
    "stored": _stored,
    "on host": _on_host,
    "ended": _ended,
    "files": _files,
    "lost": _lost,
    "differs": _differs,
    "whole": _whole,
    "loop": _loop,
    "assigned": _assigned,
    "overflow": _overflow,
}

if __name__ == "__main__":
    count = int(sys.argv[1])
    answer_requests(answer, lambda: open_logical_cpus(count))
