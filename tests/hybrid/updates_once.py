"""Trainings on meshes whose axis of data has copies of what other axes divide, beside one device.

Of those copies the first is updated and tells the others: each way to train, to assign by hand and
to go on comes together with each optimizer, model, mesh and choice of what is in pieces.
"""

import functools
import tempfile
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.helpers import (
    Training,
    assert_replicas_agree,
    assert_same_training,
    cpu_mesh_of,
    in_float64,
    steps_outside_of_run,
    tiny_data,
    train,
)
from tests.hybrid.matrix import OPTIMIZERS, Interrupt
from tests.hybrid.models_of_matrix import MODELS, data_of, normalized
from tests.hybrid.pairwise import pairwise
from tests.tensor_parallel.layouts import LayoutOfAnything
from tfparallel.callbacks import BackupAndRestore
from tfparallel.internals.keras_layers import behind
from tfparallel.pipeline.stage_variables import OptimizerNumber
from tfparallel.replicas.device_names import hosts_of

MESHES = {
    "data x pipeline": {"data": 2, "pipeline": 2},
    "data x pipeline x model": {"data": 2, "pipeline": 2, "model": 2},
    "shard x pipeline": {"shard": 2, "pipeline": 2},
    "data x shard x pipeline": {"data": 2, "shard": 2, "pipeline": 2},
    "data x shard x pipeline x model": {"data": 2, "shard": 2, "pipeline": 1, "model": 2},
}
SHARDINGS = {
    "all in pieces": {},
    "large ones in pieces": {"min_size": 30},
    "ZeRO 1": {"shard": "optimizer"},
    "slots on hosts": {"host": "optimizer"},
    "all on hosts": {"host": "parameters"},
}
MODELS_THERE = ("plain", "attention", "masked lstm", "penalties", "batch norm")
_OPTIONS = {"rows": 26, "batch_size": 13}
_NUM_MICROBATCHES = 3


def fitted(strategy: tf.distribute.Strategy | None, **options) -> Training:
    """By `fit`."""
    return train(strategy, **options)


def by_hand(strategy: tf.distribute.Strategy | None, **options) -> Training:
    """By `fit` between assignments: outside of replicas, and behind each update of a step."""

    class Shrinks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for weight in self.model.trainable_weights:
                weight.assign_sub(weight * 0.01)
            self.model.trainable_weights[0].assign(self.model.trainable_weights[0] * 0.99)

    return train(strategy, callbacks=[Shrinks()], **options)


def resumed(strategy: tf.distribute.Strategy | None, **options) -> Training:
    """By `fit` that is interrupted, and goes on with a backup."""
    if strategy is None:
        return train(None, **options)
    with tempfile.TemporaryDirectory() as folder:
        backups = functools.partial(BackupAndRestore, folder, save_freq=1, asynchronous=False)
        try:
            train(strategy, callbacks=[backups(), Interrupt()], **options)
        except KeyboardInterrupt:
            keras.backend.clear_session()
            return train(strategy, callbacks=[backups()], **options)
    raise AssertionError("The training was not interrupted.")


def outside_of_run(strategy: tf.distribute.Strategy | None, **options) -> Training:
    """By `fit`, and by steps of one's own in the scope behind it."""
    if options["data"] is not tiny_data:
        return train(strategy, **options)
    return steps_outside_of_run(train(strategy, **options), strategy)


def in_a_loop(strategy: tf.distribute.Strategy | None, **options) -> Training:
    """By a loop of one's own, and then by `fit`, which gives weights to stages."""
    data = options["data"]
    strategy_here = strategy or tf.distribute.get_strategy()
    keras.utils.set_random_seed(1)
    with strategy_here.scope():
        model = options["build"]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(options["optimizer"](), loss)
        model.optimizer.build(model.trainable_variables)
        by_row = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    x, y = data(12)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)

    @tf.function
    def step(batch):
        def of_replica(x, y):
            with tf.GradientTape() as tape:
                losses = by_row(y, model(x, training=True))
                mean = tf.nn.compute_average_loss(losses, global_batch_size=12)
                scaled = model.optimizer.scale_loss(mean)
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(scaled, weights), weights)

        strategy_here.run(of_replica, args=batch)

    for _ in range(3):
        for batch in strategy_here.experimental_distribute_dataset(batches):
            step(batch)
    assert_replicas_agree(model)
    x, y = data(_OPTIONS["rows"])
    history = model.fit(x, y, batch_size=_OPTIONS["batch_size"], verbose=0, shuffle=False)
    assert_replicas_agree(model)
    return Training(model, history.history)


WAYS: dict[str, Callable] = {
    "fit": fitted,
    "by hand": by_hand,
    "resumed": resumed,
    "outside of run": outside_of_run,
    "in a loop": in_a_loop,
}
_NEVER = [
    # BatchNorm sees other rows there than in a pipeline, and a penalty counts by the replicas.
    ("in a loop", "batch norm"),
    ("outside of run", "batch norm"),
    ("in a loop", "penalties"),
]
CELLS = pairwise(
    {
        "mesh": tuple(MESHES),
        "sharding": tuple(SHARDINGS),
        "optimizer": tuple(OPTIMIZERS),
        "model": MODELS_THERE,
        "way": tuple(WAYS),
    },
    never=_NEVER,
)


def strategy_on(mesh: str, sharding: str, model: str) -> tfparallel.HybridStrategy:
    """With all that its axes take."""
    sizes, options = MESHES[mesh], {}
    if "shard" in sizes:
        options["shard"] = tfparallel.Sharding(**{"min_size": 1, **SHARDINGS[sharding]})
    device_mesh = cpu_mesh_of(**sizes)
    if "model" in sizes:
        options["layout_map"] = LayoutOfAnything(device_mesh)
    batch_norm = "deferred" if model == "batch norm" else "per_microbatch"
    pipeline = tfparallel.PipelineOptions(_NUM_MICROBATCHES, batch_norm=batch_norm)
    return tfparallel.HybridStrategy(device_mesh, pipeline=pipeline, **options)


def check(mesh: str, sharding: str, optimizer: str, model: str, way: str) -> None:
    """Fails where a cell differs from one device, or where more than one copy has slots."""
    sizes = MESHES[mesh]
    parts = _NUM_MICROBATCHES * sizes.get("data", 1) * sizes.get("shard", 1)

    def build(parts: int | None) -> keras.Model:
        return normalized(parts) if model == "batch norm" else MODELS[model]()

    def compile_options() -> dict:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": loss, "metrics": ["accuracy"]}

    options = {"optimizer": OPTIMIZERS[optimizer], "data": data_of(model), **_OPTIONS}
    if way != "in a loop":
        options["compile_options"] = compile_options
    with in_float64():
        keras.backend.clear_session()  # layouts go by the numbers in layers' names
        expected = WAYS[way](None, build=functools.partial(build, parts), **options)
        keras.backend.clear_session()
        strategy = strategy_on(mesh, sharding, model)
        received = WAYS[way](strategy, build=functools.partial(build, None), **options)
    assert_same_training(expected, received, atol=1e-9)
    _check_slots(received.model, strategy)


def _check_slots(model: keras.Model, strategy: tfparallel.HybridStrategy) -> None:
    """Each is stored once, on the devices of the first copy or in their host's memory."""
    extended = strategy.extended
    first_copy = extended._groups[: getattr(extended, "num_shards", 1)]
    devices = {device for pipeline in first_copy for group in pipeline for device in group}
    devices.update(hosts_of(devices))
    slots = [v for v in map(behind, model.optimizer.variables) if type(v) is not OptimizerNumber]
    for slot in slots:
        stored = tf.nest.flatten(list(getattr(slot, "parts", slot.values)))
        stored = list({id(each): each for each in stored}.values())
        numbers = sum(int(np.prod(each.shape)) for each in stored)
        assert numbers == int(np.prod(slot.shape)), slot.name
        assert {each.device for each in stored} <= devices, slot.name
