"""Scripts of Keras's distribution API run on TensorFlow as they are, and give what JAX gives."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types
import unittest

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.multi_process.pool import cluster_environments
from tests.tensor_parallel.layouts import cpu_mesh
from tfparallel import keras_distribution


@pytest.fixture(autouse=True)
def _enabled(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    keras_distribution.enable()
    yield
    keras_distribution.disable()


def _model_parallel(replicas=2, parts=2, **patterns):
    layout_map = keras.distribution.LayoutMap(cpu_mesh(replicas, parts))
    layout_map["hidden/kernel"] = (None, "model")
    layout_map["hidden/bias"] = ("model",)
    layout_map["scores/kernel"] = ("model", None)
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def _data(rows=24):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 3))


def _model():
    inputs = keras.Input((6,))
    hidden = layers.Dense(9, "relu", name="hidden")(inputs)
    model = keras.Model(inputs, layers.Dense(3, name="scores")(hidden))
    model.compile("adam", "mse")
    return model


def _losses():
    keras.utils.set_random_seed(1)
    x, y = _data()
    return _model().fit(x, y, epochs=3, batch_size=12, shuffle=False, verbose=0).history["loss"]


@pytest.fixture(scope="module")
def of_one_device():
    return _losses()


def test_model_parallel_trains_in_parts_as_one_device(of_one_device):
    keras.distribution.set_distribution(_model_parallel())
    model = _model()
    assert isinstance(model.distribute_strategy, tfparallel.TensorParallelStrategy)
    assert [len(copy) for copy in model.layers[1].kernel.value.parts] == [2, 2]
    np.testing.assert_allclose(_losses(), of_one_device, rtol=1e-6)


def test_data_parallel_trains_on_all_devices_as_one_device(of_one_device):
    with keras.distribution.DataParallel().scope():
        strategy = _model().distribute_strategy
        assert strategy.num_replicas_in_sync == 4
        np.testing.assert_allclose(_losses(), of_one_device, rtol=1e-6)


def test_a_model_trains_and_predicts_after_its_scope():
    x, y = _data()
    with _model_parallel().scope():
        model = _model()
    keras.distribution.set_distribution(None)
    model.fit(x, y, verbose=0)
    assert model.predict(x, verbose=0).shape == (24, 3)


def test_a_scope_within_another_comes_back():
    outer, inner = _model_parallel(), keras.distribution.DataParallel()
    with outer.scope():
        with inner.scope():
            assert isinstance(_model().distribute_strategy, tfparallel.MirroredStrategy)
        assert _model().distribute_strategy is keras_distribution.strategy_for(outer)
    assert not hasattr(_model().distribute_strategy, "rank")


def test_devices_are_listed_and_counted():
    assert keras.distribution.list_devices() == [f"cpu:{i}" for i in range(4)]
    assert keras.distribution.list_devices("cpu") == keras.distribution.list_devices()
    assert keras.distribution.get_device_count() == 4
    assert keras.distribution.get_device_count("gpu") == 0


def test_the_layout_of_an_output_changes_nothing(of_one_device):
    keras.distribution.set_distribution(_model_parallel(**{"hidden/output": ("batch", None)}))
    np.testing.assert_allclose(_losses(), of_one_device, rtol=1e-6)


def test_a_pattern_that_matches_nothing_is_told_and_not_refused(caplog):
    keras.distribution.set_distribution(_model_parallel(**{".*danse.*": ("model",)}))
    _losses()
    assert caplog.text.count("match nothing: ['.*danse.*']") == 1


def test_a_mesh_of_devices_that_are_not_there_is_refused():
    mesh = keras.distribution.DeviceMesh((8,), ["batch"], [f"cpu:{i}" for i in range(8)])
    with pytest.raises(ValueError, match="must name devices of this process. Received: 'cpu:4'"):
        keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    assert keras.distribution.distribution() is None


def test_disable_takes_everything_away():
    from keras.src.backend.tensorflow import distribution_lib

    keras.distribution.set_distribution(_model_parallel())
    keras_distribution.disable()
    assert keras.distribution.distribution() is None
    assert not hasattr(distribution_lib, "get_device_count")
    assert not hasattr(_model().distribute_strategy, "rank")


def test_enable_after_a_distribution_was_set_is_refused():
    keras_distribution.disable()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        with pytest.raises(RuntimeError, match="DataParallel.* is set"):
            keras_distribution.enable()
    finally:
        keras.distribution.set_distribution(None)


def test_initialize_writes_the_cluster_of_all_addresses(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")
    keras.distribution.initialize("10.0.0.1:1234,10.0.0.2:2345", 2, 1)
    assert json.loads(os.environ["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:2345"]},
        "task": {"type": "worker", "index": 1},
    }
    assert keras.distribution.DataParallel(devices=["cpu:0"]).num_processes == 2


@pytest.mark.parametrize("kind", ["DataParallel", "ModelParallel"])
def test_processes_that_give_other_rows_each_are_refused(monkeypatch, kind):
    monkeypatch.setenv("TF_CONFIG", "")
    keras.distribution.initialize("10.0.0.1:1234,10.0.0.2:2345", 2, 1)
    distribution = keras.distribution.DataParallel(devices=["cpu:0"])
    if kind == "ModelParallel":
        distribution = _model_parallel()
    distribution.auto_shard_dataset = False
    with pytest.raises(NotImplementedError, match="auto_shard_dataset=True.*as rank 1"):
        keras.distribution.set_distribution(distribution)


def test_initialize_needs_every_address(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")
    with pytest.raises(ValueError, match="an address for each process.*num_processes=2"):
        keras.distribution.initialize("10.0.0.1:1234", 2, 0)


_OF_TWO_PROCESSES = """
import sys

import keras
import numpy as np
import tensorflow as tf

import tfparallel

tfparallel.keras_distribution.enable()
addresses, rank, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
keras.distribution.initialize(addresses, 2, rank)
devices = keras.distribution.list_devices()
if kind == "DataParallel":
    distribution = keras.distribution.DataParallel(devices=devices)
else:
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["hidden/kernel"] = (None, "model")
    layout_map["scores/kernel"] = ("model", None)
    layout_map["another/kernel"] = ("model", None)  # presets name layers that a model has not
    distribution = keras.distribution.ModelParallel(layout_map=layout_map)
keras.distribution.set_distribution(distribution)
keras.utils.set_random_seed(1)
inputs = keras.Input((6,))
hidden = keras.layers.Dense(9, "relu", name="hidden")(inputs)
model = keras.Model(inputs, keras.layers.Dense(3, name="scores")(hidden))
model.compile("adam", "mse")
assert len(devices) == 2
replicas = {"DataParallel": 2, "ModelParallel": 1}[kind]
assert model.distribute_strategy.num_replicas_in_sync == replicas
rng = np.random.default_rng(0)
data = rng.normal(size=(24, 6)).astype("float32"), rng.normal(size=(24, 3))
batches = tf.data.Dataset.from_tensor_slices(data).batch(12)
losses = model.fit(batches, epochs=2, verbose=0).history["loss"]
losses += model.fit(*data, batch_size=12, shuffle=False, verbose=0).history["loss"]
print(*map(repr, losses))
"""


@pytest.mark.turns
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["DataParallel", "ModelParallel"])
def test_two_processes_that_are_initialized_train_as_one_device(tmp_path, of_one_device, kind):
    """By a dataset and by arrays; each is given all data, which are divided once."""
    script = tmp_path / "train.py"
    script.write_text(_OF_TWO_PROCESSES)
    config = json.loads(cluster_environments(2)[0]["TF_CONFIG"])
    addresses = ",".join(config["cluster"]["worker"])
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    environment.pop("TF_CONFIG", None)
    processes = [
        subprocess.Popen(
            [sys.executable, script, addresses, str(rank), kind],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (losses, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors[-3000:]
        np.testing.assert_allclose([float(x) for x in losses.split()], of_one_device, rtol=1e-5)


# ---- beside JAX, and Keras's own tests -----------------------------------------------------------

# Trains a model from saved weights on the backend it is started with; prints the losses.
_SCRIPT = """
import os, sys
if os.environ["KERAS_BACKEND"] == "jax":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
else:
    from tests.helpers import open_logical_cpus
    open_logical_cpus(4)
import keras, numpy as np
from keras import layers
if os.environ["KERAS_BACKEND"] == "tensorflow":
    import tfparallel
    tfparallel.keras_distribution.enable()
weights, = sys.argv[1:]
mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), keras.distribution.list_devices())
layout_map = keras.distribution.LayoutMap(mesh)
layout_map[".*(query|key|value)/kernel"] = (None, "model", None)
layout_map[".*attention_output/kernel"] = ("model", None, None)
layout_map["up/kernel"] = (None, "model")
layout_map["up/bias"] = ("model",)
layout_map["down/kernel"] = ("model", None)
layout_map["tokens/embeddings"] = ("model", None)
distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
keras.distribution.set_distribution(distribution)
tokens = keras.Input((6,), dtype="int32")
x = layers.Embedding(20, 8, name="tokens")(tokens)
y = layers.LayerNormalization()(x)
x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True)])
y = layers.Dense(16, "gelu", name="up")(layers.LayerNormalization()(x))
x = layers.Add()([x, layers.Dense(8, name="down")(y)])
model = keras.Model(tokens, layers.Dense(20)(x))
if os.path.exists(weights):
    model.load_weights(weights)
else:
    model.save_weights(weights)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
ids = np.random.default_rng(0).integers(0, 20, (32, 7))
fit = dict(epochs=4, batch_size=8, shuffle=False, verbose=0)
print(*map(repr, model.fit(ids[:, :-1], ids[:, 1:], **fit).history["loss"]))
"""


def _losses_of_backend(python, backend, script, weights):
    environment = {**os.environ, "KERAS_BACKEND": backend}
    if backend == "jax":
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, script, weights],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(x) for x in done.stdout.split()]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_losses_are_those_of_jax(tmp_path):
    """JAX has an environment of its own: uv makes it, or `JAX_PYTHON` names its Python.

    By SGD: with Adam and an Embedding plain Keras's backends differ from one another, by 2e-3.
    """
    python = os.environ.get("JAX_PYTHON")
    if python is None:
        uv = pathlib.Path(sys.executable).with_name("uv")
        if not uv.exists():
            pytest.skip("uv, which installs JAX for this test, is not installed")
        folder = tmp_path / "environment"  # not "jax", which the script beside it would import
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True)
        python = folder / "bin" / "python"
        install = [uv, "pip", "install", "-q", "--python", python]
        subprocess.run([*install, "jax[cpu]", f"keras=={keras.__version__}"], check=True)
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    weights = str(tmp_path / "first.weights.h5")
    ours = _losses_of_backend(sys.executable, "tensorflow", script, weights)
    jax = _losses_of_backend(python, "jax", script, weights)
    np.testing.assert_allclose(ours, jax, rtol=1e-5)


_GUIDE = """
# https://keras.io/guides/distribution/, on TensorFlow: `list_devices` instead of JAX's, a seed, and
# the rate of Dropout, whose masks no two devices share.
import sys

import keras
import numpy as np
from keras import layers
from tensorflow import data as tf_data

import tfparallel

tfparallel.keras_distribution.enable()
rate = float(sys.argv[1])
devices = keras.distribution.list_devices()
assert len(devices) == 8
rng = np.random.default_rng(0)
inputs, labels = rng.normal(size=(128, 28, 28, 1)), rng.normal(size=(128, 10))
dataset = tf_data.Dataset.from_tensor_slices((inputs, labels)).batch(16)


def losses():
    keras.utils.set_random_seed(0)
    inputs = layers.Input(shape=(28, 28, 1))
    y = layers.Flatten()(inputs)
    y = layers.Dense(units=200, use_bias=False, activation="relu", name="d1")(y)
    y = layers.Dropout(rate)(y)
    y = layers.Dense(units=10, activation="softmax", name="d2")(y)
    model = keras.Model(inputs=inputs, outputs=y)
    model.compile(loss="mse")
    history = model.fit(dataset, epochs=3, verbose=0).history["loss"]
    return model, [*history, model.evaluate(dataset, verbose=0)]


_, expected = losses()

mesh_1d = keras.distribution.DeviceMesh(shape=(8,), axis_names=["data"], devices=devices)
keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh_1d))
model, data_parallel = losses()
assert model.distribute_strategy.num_replicas_in_sync == 8

mesh_2d = keras.distribution.DeviceMesh(
    shape=(2, 4), axis_names=["data", "model"], devices=devices
)
layout_map = keras.distribution.LayoutMap(mesh_2d)
layout_map["d1/kernel"] = (None, "model")
layout_map["d1/bias"] = ("model",)
layout_map["d2/output"] = ("data", None)
keras.distribution.set_distribution(
    keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
)
model, model_parallel = losses()
parts = model.get_layer("d1").kernel.value.parts
assert [[part.shape.as_list() for part in copy] for copy in parts] == [[[784, 50]] * 4] * 2

print(*expected, *data_parallel, *model_parallel)
"""


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_the_guide_of_keras_runs_on_eight_devices(tmp_path, rate):
    """With its Dropout it trains; without, to the losses of one device."""
    script = tmp_path / "guide.py"
    script.write_text(_GUIDE)
    done = subprocess.run(
        [sys.executable, script, str(rate)],
        env={**os.environ, "TFPARALLEL_LOGICAL_CPUS": "8"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = np.array([float(x) for x in done.stdout.split()]).reshape(3, 4)
    expected, *others = losses
    for each in others:
        np.testing.assert_allclose(each, expected, rtol=1e-5 if rate == 0 else 0.1)
        assert each[0] > each[2]  # it learns


def _keras_source(folder: pathlib.Path) -> pathlib.Path:
    """Of the Keras that is installed: `KERAS_SOURCE`, or what pip unpacks into `folder`."""
    if source := os.environ.get("KERAS_SOURCE"):
        return pathlib.Path(source)
    download = ["download", "-q", "--no-deps", "--no-binary", ":all:", "--dest", folder]
    command = [sys.executable, "-m", "pip", *download, f"keras=={keras.__version__}"]
    if subprocess.run(command, timeout=600).returncode:
        pytest.skip("KERAS_SOURCE names no source of Keras, and it cannot be downloaded here")
    (archive,) = folder.glob("keras-*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.mark.long
def test_keras_tests_of_the_distribution_api_pass(tmp_path):
    """All of them. Marks say that they are for JAX: not read here."""
    path = _keras_source(tmp_path) / "keras/src/distribution/distribution_lib_test.py"
    module = types.ModuleType("keras_distribution_lib_test")
    text = path.read_text().replace("@pytest.mark.multi_device\n", "")
    exec(compile(text, str(path), "exec"), vars(module))
    cases = [
        test
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase)
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(cls)
    ]
    result = unittest.TestResult()
    unittest.TestSuite(cases).run(result)
    problems = [f"{test.id()}\n{text}" for test, text in [*result.failures, *result.errors]]
    assert not problems, "\n".join(problems)
    assert not result.skipped, result.skipped
    assert result.testsRun > 30


# Keras's tests of its JAX backend (`keras/src/backend/jax/distribution_lib_test.py`) ask JAX's
# arrays where they are, so they are here in words of ours:
#
#     get_device_count, list_devices, initialize_*, processes     above
#     e2e_data_parallel_model, e2e_model_parallel_model,          below
#     e2e_model_parallel_with_output_sharding,
#     variable_assignment_reuse_layout
#     device_conversion, distribute_tensor, to_backend_mesh,      none: they are of `jax.Array`,
#     to_backend_layout, distribute_data_input, validation_*      `jax.sharding` and its meshes


def _of_dense(**patterns):
    layout_map = keras.distribution.LayoutMap(cpu_mesh(2, 2))
    layout_map[".*dense.*kernel"] = keras.distribution.TensorLayout([None, "model"])
    layout_map[".*dense.*bias"] = keras.distribution.TensorLayout(["model"])
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def _image_losses(distribution):
    keras.utils.set_random_seed(0)
    with distribution.scope() if distribution else contextlib.nullcontext():
        inputs = keras.Input((28, 28, 1))
        y = layers.Dense(200, use_bias=False, activation="relu")(layers.Flatten()(inputs))
        model = keras.Model(inputs, layers.Dense(10, activation="softmax")(y))
        model.compile(loss="mse")
        x, labels = (np.random.normal(size=(32, *shape)) for shape in ((28, 28, 1), (10,)))
        fitted = model.fit(x, labels, batch_size=4, shuffle=False, verbose=0)
    return model, fitted.history["loss"]


@pytest.mark.long
@pytest.mark.parametrize(
    "distribution",
    [
        keras.distribution.DataParallel,
        _of_dense,
        lambda: _of_dense(**{".*dense.*output": ("batch", None)}),
    ],
    ids=["data_parallel", "model_parallel", "with_output_sharding"],
)
def test_keras_end_to_end_models_train_as_on_one_device(distribution):
    distribution = distribution()
    model, losses = _image_losses(distribution)
    if isinstance(distribution, keras.distribution.ModelParallel):
        for weight in model.weights:
            assert {len(copy) for copy in weight.value.parts} == {2}
            assert weight.value.rows.dim == len(weight.shape) - 1
    np.testing.assert_allclose(losses, _image_losses(None)[1], rtol=1e-5)


def test_an_assigned_weight_stays_in_its_parts():
    with _of_dense().scope():
        dense = layers.Dense(8)
        dense.build((16, 16))
    kernel = np.random.normal(size=(16, 8)).astype("float32")
    dense.kernel.assign(kernel)  # outside of the scope, as weights are loaded
    for copy in dense.kernel.value.parts:
        np.testing.assert_array_equal(copy[0].numpy(), kernel[:, :4])
        np.testing.assert_array_equal(copy[1].numpy(), kernel[:, 4:])
