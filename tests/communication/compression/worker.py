"""The program of two workers that train under `MultiWorkerMirroredStrategy(compression=...)`."""

import functools
import json
import os

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.helpers import open_logical_cpus
from tests.hybrid.meshes import hybrid, over_processes
from tests.multi_process.answering import answer_requests
from tfparallel.compression import Adaptive, PowerSGD, RandomK, TopK

COMPRESSIONS = {
    "none": lambda: None,
    "fp16": lambda: "fp16",
    "bf16": lambda: "bf16",
    "power_sgd": lambda: PowerSGD(2),
    "top_k": lambda: TopK(0.1),
    "random_k": lambda: RandomK(0.2),
    "qsgd": lambda: "qsgd",
    "adaptive": lambda: Adaptive(ranks=(1,), interval=2),
}


class Overflow(keras.layers.Layer):
    """Sends back infinite gradients, for a batch with a number above 1e4; that counts as 0."""

    def call(self, x):
        bad = tf.abs(x) > 1e4

        @tf.custom_gradient
        def forward(y):
            has_bad = tf.reduce_any(bad)
            return tf.identity(y), lambda g: tf.where(has_bad, np.inf * tf.ones_like(g), g)

        return forward(tf.where(bad, 0.0, x))


def train(
    compression,
    rows=48,
    batch_size=13,
    steps_per_execution=1,
    wrap="",
    accumulate=None,
    table=False,
    mesh=None,
    over=None,
    levels=(),
):
    """A tiny model for three epochs of four uneven batches; returns what ranks must agree on.

    Args:
        batch_size: 12 gives workers the same rows, however many replicas they have.
        mesh: sizes of the axes of each worker's devices, and more of `tests.hybrid.meshes.hybrid`;
            by default one device.
        over: the same, of one mesh of the devices of all workers.
        levels: of `Adaptive`: for each of them it tells the collectives of three more epochs.
    """
    keras.backend.clear_session()  # the layouts of meshes go by layers' names
    strategy = _strategy(COMPRESSIONS[compression](), mesh, over)
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype("float32")
    y = np.argmax(x @ rng.normal(size=(6, 3)), 1)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulate)
        if wrap:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)
        first = [keras.layers.Embedding(20, 4), keras.layers.Flatten()] if table else []
        if wrap == "overflow":
            first = [keras.layers.Dense(6, use_bias=False), Overflow()]
            x[15, 0] = 1e6  # of rank 0 in the second batch
        layers = [*first, keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(12)]
        inputs = keras.Input((6,), dtype="int32" if table else "float32")
        model = keras.Sequential([inputs, *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, steps_per_execution=steps_per_execution)
    x = np.abs(x * 8).astype("int32") % 20 if table else x
    fit = functools.partial(
        model.fit, x, y, batch_size=batch_size, epochs=3, verbose=0, shuffle=False
    )
    history = fit().history["loss"]
    state = getattr(model.optimizer, "gradient_compression", None)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    saved = [name for name, _ in tf.train.list_variables(_checkpoint(model))]
    return {
        "history": history,
        "weights": [w.tolist() for w in model.get_weights()],
        "shared": [] if state is None else [v.numpy().tolist() for v in state.shared_variables()],
        "residuals": [v.numpy().tolist() for v in _residuals(state)],
        "saved": [name for name in saved if "gradient_compression" in name],
        "reports": [str(report) for report in strategy.compression_report()],
        "scale": float(model.optimizer.dynamic_scale.numpy()) if wrap else None,
        "iterations": int(inner.iterations.numpy()),
        "collectives": [_collectives(strategy, state._reducer, level, fit) for level in levels],
    }


def _collectives(strategy, reducer, level, fit) -> int:
    """How many there are in a `fit` whose gradients are all sent at one level."""
    neighbours = strategy.extended._ring_all_reduce._ring._neighbours
    reducer._rows.assign(tf.fill(reducer._rows.shape, level))
    reducer._countdown.assign(1000)
    before = neighbours._ours[0]
    fit()
    return neighbours._ours[0] - before


def _strategy(compression, mesh, over):
    if over is not None:
        return over_processes(**over, compression=compression)
    inner = None if mesh is None else functools.partial(hybrid, **mesh)
    return tfparallel.MultiWorkerMirroredStrategy(compression=compression, inner=inner)


def _residuals(state):
    shared = {id(v) for v in state.shared_variables()} if state is not None else set()
    return [v for v in state.variables if id(v) not in shared] if state is not None else []


def _checkpoint(model) -> str:
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    path = os.path.join(os.environ["COMPRESSION_FOLDER"], f"checkpoint{rank}")
    return tf.train.Checkpoint(optimizer=model.optimizer).write(path)


def _begin() -> None:
    open_logical_cpus(4)  # of which a worker without a mesh takes one
    tfparallel.MultiWorkerMirroredStrategy()  # joins the cluster


if __name__ == "__main__":
    answer_requests(train, _begin)
