"""What is computed again trains to the same weights, and is not kept."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.conformance.models import MODELS
from tests.helpers import assert_same_training, train

FULL = tfparallel.MemoryPolicy("full")
STRATEGIES = {
    "one_device": lambda memory: tfparallel.OneDeviceStrategy("CPU:0", memory=memory),
    "mirrored": lambda memory: tfparallel.MirroredStrategy(["CPU:0", "CPU:1"], memory=memory),
    "central": lambda memory: tfparallel.CentralStorageStrategy(["CPU:0", "CPU:1"], memory=memory),
    "sharded": lambda memory: tfparallel.ShardedStrategy(
        ["CPU:0", "CPU:1"], min_size=1, memory=memory
    ),
}


def blocks(count: int, width: int) -> keras.Model:
    """Each block has four activations within, and a mask of its own."""

    def block(number):
        inner = [keras.layers.Dense(width, "gelu") for _ in range(2)]
        layers = [inner[0], keras.layers.Dropout(0.3, seed=number), inner[1]]
        return keras.Sequential(layers, name=f"block_{number}")

    layers = [block(i) for i in range(count)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(3)])


def data(rows: int, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, width)).astype("float32"), rng.integers(0, 3, rows)


def trained(strategy, build=lambda: blocks(2, 8)) -> dict[str, np.ndarray]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data(26)
    losses = model.fit(x, y, batch_size=13, epochs=2, shuffle=False, verbose=0).history["loss"]
    weights = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    return {"losses": np.asarray(losses), **weights}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("rematerialize", ["full", ("block_*",)])
def test_it_trains_as_if_all_was_kept(name, rematerialize):
    kept = trained(STRATEGIES[name](None))
    again = trained(STRATEGIES[name](tfparallel.MemoryPolicy(rematerialize)))
    for key, expected in kept.items():
        np.testing.assert_allclose(again[key], expected, rtol=0, atol=5e-7, err_msg=key)


@pytest.mark.parametrize("name", ["lstm", "attention", "cnn", "regularized", "shared_layers"])
def test_models_of_all_kinds_train_as_on_one_device(name):
    model = MODELS[name]
    options = {"build": model.build, "compile_options": model.compile_options, "data": model.data}
    strategy = tfparallel.OneDeviceStrategy("CPU:0", memory=FULL)
    assert_same_training(train(None, **options), train(strategy, **options))


def above_rest(memory: tfparallel.MemoryPolicy | None, build=lambda: blocks(6, 128)) -> int:
    """Bytes that TensorFlow has in use in a step at most, above those before it."""
    with tfparallel.OneDeviceStrategy("CPU:0", memory=memory).scope():
        model = build()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data(2048, 128)
    model.train_on_batch(x, y)
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    model.train_on_batch(x, y)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def test_what_is_computed_again_is_not_kept():
    assert above_rest(tfparallel.MemoryPolicy({"block_*"})) <= 0.6 * above_rest(None)


@pytest.mark.parametrize(
    "scope",
    [
        {"mode": "full"},
        {"mode": "list_of_layers", "layer_names": ["block_0", "block_1"]},
        {"mode": "larger_than", "output_size_threshold": 4},
        {"mode": "activations"},
    ],
    ids=lambda scope: scope["mode"],
)
@pytest.mark.parametrize("name", ["one_device", "mirrored", "sharded"])
def test_remat_scopes_of_keras_train_as_if_all_was_kept(name, scope):
    def build():
        with keras.RematScope(**scope):
            return blocks(2, 8)

    kept = trained(STRATEGIES[name](None))
    for key, again in trained(STRATEGIES[name](None), build).items():
        np.testing.assert_allclose(again, kept[key], rtol=0, atol=5e-7, err_msg=key)


def test_a_remat_scope_of_keras_saves_what_the_policy_does():
    def build():
        with keras.RematScope(mode="full"):
            return blocks(6, 128)

    assert above_rest(None, build) <= 0.6 * above_rest(None)


@pytest.mark.parametrize("choice", ["everything", "", ()])
def test_a_choice_that_is_none_is_refused(choice):
    with pytest.raises(ValueError, match="`rematerialize` must be one of 'none', 'full' or a set"):
        tfparallel.MemoryPolicy(choice)


def test_a_pattern_that_names_no_layer_is_refused():
    with pytest.raises(ValueError, match=r"`rematerialize` must name a layer. Received: 'blocks'"):
        trained(STRATEGIES["one_device"](tfparallel.MemoryPolicy({"blocks"})))
