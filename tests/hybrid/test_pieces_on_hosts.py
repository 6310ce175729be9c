"""Pieces beside pipelines and matrices in parts, in the host's memory: CPU:0 here, a device too."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import assert_same_training, cpu_mesh_of, in_float64, train
from tests.tensor_parallel.layouts import LayoutOfAnything
from tfparallel import HybridStrategy, PipelineOptions, Sharding

pytestmark = pytest.mark.turns

optimizers = keras.optimizers
MESHES = {"model": {"shard": 2, "model": 2}, "pipeline": {"shard": 2, "pipeline": 2}}
KINDS = [("optimizer", "parameters"), ("parameters", "parameters"), ("optimizer", "gradients")]


def on_host(sizes, host, what="parameters", min_size=1, mesh=None, **options):
    mesh = cpu_mesh_of(**sizes) if mesh is None else mesh
    arguments = {"shard": Sharding(what, min_size, host=host)}
    if "model" in sizes:
        arguments["layout_map"] = LayoutOfAnything(mesh)
    if "pipeline" in sizes:
        arguments["pipeline"] = PipelineOptions(2, **options)
    return HybridStrategy(mesh, **arguments)


def with_table():
    x = keras.Input((4,), dtype="int32")
    y = layers.LSTM(6, name="lstm")(layers.Embedding(11, 8, name="embedding")(x))
    return keras.Model(x, layers.Dense(3, name="dense_0")(y))


def tokens(rows):
    x = tf.random.stateless_uniform((rows, 4), (1, 2), maxval=11, dtype=tf.int32)
    return x.numpy(), x.numpy()[:, 0] % 3


def adam():
    return optimizers.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
    )


TRAININGS = {
    "with all options": {"optimizer": adam},
    "accumulated": {
        "optimizer": lambda: optimizers.Adam(
            0.01, gradient_accumulation_steps=2, global_clipnorm=0.1
        )
    },
    "scaled": {"optimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), 64.0)},
    "of the whole": {"optimizer": lambda: optimizers.Lamb(0.01)},
    "uneven": {"optimizer": adam, "rows": 20, "batch_size": 13},
    "table": {"optimizer": adam, "build": with_table, "data": tokens},
}
_BY_DEFAULT = {("with all options", "pipeline"), ("accumulated", "model")}


def _cells():
    for name in TRAININGS:
        for axis in MESHES:
            for kind in KINDS:
                is_default = (name, axis) in _BY_DEFAULT and kind != KINDS[2]
                marks = [] if is_default else pytest.mark.long
                yield pytest.param(name, axis, *kind, marks=marks)


@pytest.mark.parametrize(("name", "axis", "host", "what"), list(_cells()))
def test_it_trains_as_one_device(name, axis, host, what):
    options = TRAININGS[name]
    with in_float64():
        reference = train(None, **options)
        keras.backend.clear_session()  # `LayoutOfAnything` goes by the numbers in layers' names
        candidate = train(on_host(MESHES[axis], host, what), **options)
        assert_same_training(reference, candidate, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("host", ["optimizer", "parameters"])
@pytest.mark.parametrize(
    "options", [{"rematerialize": "full"}, {"schedule": "zero_bubble"}], ids=str
)
def test_so_do_options_of_a_pipeline(host, options):
    strategy = on_host(MESHES["pipeline"], host, **options)
    with in_float64():
        reference = train(None, optimizer=adam)
        assert_same_training(reference, train(strategy, optimizer=adam), atol=1e-9)


def numbers(variable):
    return [device_number(part.device) for part in variable.value.parts[0]]


def device_number(device):
    return tf.DeviceSpec.from_string(device).device_index


DEVICES = {"model": [0, 2, 1, 3], "pipeline": [0, 2]}  # of the pieces of the first kernel


@pytest.mark.parametrize(("host", "what"), [(None, "parameters"), *KINDS])
@pytest.mark.parametrize("axis", MESHES)
def test_what_is_asked_for_is_on_the_host(axis, host, what):
    strategy = on_host(MESHES[axis], host, what, min_size=20)  # biases are whole
    model, graph = step_of(strategy)
    kernel, bias, *_ = model.trainable_weights
    slot = next(v for v in model.optimizer.variables if v.path.endswith("kernel_momentum"))
    devices = DEVICES[axis]
    assert numbers(kernel) == ([0] * len(devices) if host == "parameters" else devices)
    assert numbers(slot) == (devices if host is None else [0] * len(devices))
    assert getattr(bias.value, "shards", 1) == 1
    found = {device_number(op.device) for op in graph.get_operations() if is_of_kernel(op)}
    assert found == ({0} if host is not None else {0, 1, 2, 3})


@pytest.mark.parametrize("host", ["optimizer", "parameters"])
def test_devices_compute_with_what_the_host_updates(host):
    """Here the host is no device of the mesh."""
    sizes = {"shard": 2, "model": 1}
    mesh = keras.distribution.DeviceMesh((2, 1), tuple(sizes), ["cpu:1", "cpu:2"])
    _, graph = step_of(on_host(sizes, host, mesh=mesh))
    products = [op for op in graph.get_operations() if op.type == "MatMul"]
    assert {device_number(op.device) for op in products} == {1, 2}
    roots = [op for op in graph.get_operations() if is_of_kernel(op)]
    assert {device_number(op.device) for op in roots} == {0}


def is_of_kernel(operation):
    """Of a step only Adam takes square roots."""
    return operation.type == "Sqrt" and operation.outputs[0].shape.rank == 2


def step_of(strategy):
    with strategy.scope():
        x = keras.Input((6,))
        y = layers.Dense(8, "tanh", name="dense_0")(x)
        model = keras.Model(x, layers.Dense(6, name="dense_1")(y))
        model.compile("adam", "mse")
    x = tf.ones((8, 6))
    model.train_on_batch(x, x)
    step = tf.function(lambda: strategy.run(model.train_step, ((x, x),)))
    return model, step.get_concrete_function().graph
