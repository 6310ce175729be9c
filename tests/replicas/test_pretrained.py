"""Pretrained weights reach shards tensor by tensor, and what does not fit is said before."""

import tracemalloc

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import save_file

import tfparallel
from tests.multi_process.pool import WorkerPool, cluster_environments

WIDTH, NUM_LAYERS = 512, 12
LAYER_BYTES = WIDTH * WIDTH * 4


def build(width: int = 6, num_layers: int = 2) -> keras.Model:
    layers = [keras.layers.Dense(width, name=f"dense_{i}") for i in range(num_layers)]
    return keras.Sequential([keras.Input((width,)), *layers], name="model")


def build_with_statistics() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, name="hidden")(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    outputs = keras.layers.Dense(3, name="out")(keras.layers.Dropout(0.5)(hidden))
    return keras.Model(inputs, outputs)


def save(model: keras.Model, kind: str, folder) -> str:
    if kind == "folder":
        halves = np.array_split([weight.path for weight in model.weights], 2)
        arrays = {weight.path: weight.numpy() for weight in model.weights}
        for i, names in enumerate(halves):
            save_file({str(name): arrays[name] for name in names}, folder / f"{i}.safetensors")
        return folder
    path = folder / f"model{kind}"
    if kind == ".safetensors":
        save_file({weight.path: weight.numpy() for weight in model.weights}, path)
    elif kind == ".keras":
        model.save(path)
    else:
        model.save_weights(path)
    return path


KINDS = [".weights.h5", ".keras", ".safetensors", "folder"]
STRATEGIES = {
    "none": lambda: None,
    "sharded": lambda: tfparallel.ShardedStrategy(["CPU:0", "CPU:1"], min_size=1),
    "optimizer": lambda: tfparallel.ShardedStrategy(
        ["CPU:0", "CPU:1", "CPU:2"], min_size=1, shard="optimizer"
    ),
    "mirrored": lambda: tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]),
    "pipeline": lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_weights_are_those_of_the_file(make, kind, tmp_path):
    keras.utils.set_random_seed(0)
    saved = build_with_statistics()
    saved.set_weights([np.random.normal(size=w.shape) for w in saved.weights])
    path = save(saved, kind, tmp_path)
    strategy = make()
    with strategy.scope() if strategy else tf.device("CPU:0"):
        model = build_with_statistics()
    assert tfparallel.load_weights(model, path) == []
    for received, expected in zip(model.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_than_a_few_tensors_are_in_memory_beside_the_shards(kind, tmp_path):
    path = save(build(WIDTH, NUM_LAYERS), kind, tmp_path)
    with STRATEGIES["sharded"]().scope():
        model = build(WIDTH, NUM_LAYERS)
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tracemalloc.start()
    try:
        tfparallel.load_weights(model, path)
        of_arrays = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    of_tensors = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before
    assert of_tensors < 2.5 * LAYER_BYTES
    assert of_arrays < 3.5 * LAYER_BYTES


def trained(model: keras.Model) -> keras.Model:
    """With slots that are not zero."""
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    model.train_on_batch(np.ones((2, *model.input_shape[1:])), np.ones((2, model.output_shape[1])))
    return model


def kept(model: keras.Model) -> list[np.ndarray]:
    """What a file keeps: Keras leaves the states of seeds out."""
    return [np.asarray(v) for v in [*model.weights, *model.optimizer.variables]]


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_a_model_with_its_slots_is_that_of_the_file(make, tmp_path):
    saved = trained(build_with_statistics())
    saved.save(tmp_path / "model.keras")
    strategy = make()
    with strategy.scope() if strategy else tf.device("CPU:0"):
        model = tfparallel.load_model(tmp_path / "model.keras")
    assert len(model.optimizer.variables) == 2 + 2 * len(model.trainable_variables)
    for received, expected in zip(kept(model), kept(saved), strict=True):
        np.testing.assert_array_equal(received, expected)


def test_a_model_is_read_without_having_its_file_in_memory(tmp_path):
    """Of 12 kernels and their 24 slots Keras's own has 39, and a few of them are what it takes."""
    trained(build(WIDTH, NUM_LAYERS)).save(tmp_path / "model.keras")
    with STRATEGIES["sharded"]().scope():
        tracemalloc.start()
        try:
            model = tfparallel.load_model(tmp_path / "model.keras")
            of_arrays = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert len(model.optimizer.variables) == 2 + 4 * NUM_LAYERS
    assert of_arrays < 4 * LAYER_BYTES


def test_what_is_no_file_of_a_model_is_left_to_keras(tmp_path):
    with pytest.raises(ValueError, match="File not found"):
        tfparallel.load_model(tmp_path / "absent.keras")
    model = build()
    model.save(tmp_path / "model.h5")
    read = tfparallel.load_model(tmp_path / "model.h5", compile=False)
    np.testing.assert_array_equal(read.get_weights()[0], model.get_weights()[0])


@pytest.fixture(scope="module")
def workers():
    pool = WorkerPool(["-m", "tests.replicas.pretrained_worker"], lambda: cluster_environments(2))
    yield pool
    pool.close()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_workers_read_their_halves_and_none_has_the_whole(workers, kind, tmp_path):
    saved = build(WIDTH, NUM_LAYERS)
    path = save(saved, kind, tmp_path)
    keras.utils.set_random_seed(0)
    of_rank_zero = build(WIDTH, NUM_LAYERS)
    replies = workers.ask({"path": str(path), "out": str(tmp_path / "own")}, timeout_s=200)
    kernels = NUM_LAYERS * LAYER_BYTES
    for own in replies:
        assert 0.5 * kernels <= own["stored"] < 0.5 * kernels + LAYER_BYTES
        assert own["of_build"] < own["stored"] + 0.75 * LAYER_BYTES
        assert own["of_tensors"] < 2.5 * LAYER_BYTES
        assert own["of_arrays"] < 3.5 * LAYER_BYTES
        assert own["sent"] == 0
    assert_has_halves(tmp_path / "own_built", of_rank_zero)
    assert_has_halves(tmp_path / "own", saved)


def assert_has_halves(path, expected: keras.Model) -> None:
    """Together the files of both workers hold the weights of `expected`."""
    halves = [np.load(f"{path}_{rank}.npz") for rank in range(2)]
    for name, weight in zip(halves[0].files, expected.get_weights(), strict=True):
        own = np.concatenate([half[name] for half in halves])
        np.testing.assert_array_equal(own, weight.reshape(-1))


def test_tensors_of_other_names_orders_and_dtypes(tmp_path):
    model = build()
    arrays = {
        f"h.{i}.{kind}": np.random.normal(size=shape).astype(ml_dtypes.bfloat16)
        for i in range(2)
        for kind, shape in (("weight", (6, 6)), ("bias", (6,)))
    }
    save_file({**arrays, "h.9.weight": np.ones(3, "float32")}, tmp_path / "a.safetensors")

    def name(weight):
        layer = weight.path.partition("dense_")[2][0]
        return f"h.{layer}.{'weight' if weight.name == 'kernel' else 'bias'}"

    unused = tfparallel.load_weights(model, tmp_path / "a.safetensors", name, lambda w, x: x.T)
    assert unused == ["h.9.weight"]
    for weight in model.weights:
        np.testing.assert_array_equal(weight.numpy(), arrays[name(weight)].astype("float32").T)


def test_what_does_not_fit_is_said_before_a_weight_is_changed(tmp_path):
    model = build()
    before = model.get_weights()
    arrays = {weight.path: weight.numpy() + 1 for weight in model.weights}
    arrays["model/dense_1/kernel"] = np.ones((6, 7), "float32")
    arrays["other"] = arrays.pop("model/dense_1/bias")
    save_file(arrays, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"no tensor '.*dense_1/bias'; .*\[6, 7\] for"):
        tfparallel.load_weights(model, tmp_path / "a.safetensors")
    for received, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.bin", {}, "a.bin"),
        ("a.keras", {"names": str}, "for safetensors"),
        ("a.safetensors", {}, "in the format of safetensors"),
        ("", {}, "A folder with files"),
    ],
)
def test_other_files_are_refused(tmp_path, name, options, message):
    if name:
        (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=message):
        tfparallel.load_weights(build(), tmp_path / name, **options)


def test_a_model_that_is_not_built_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not built"):
        tfparallel.load_weights(keras.Sequential([keras.layers.Dense(2)]), tmp_path)
