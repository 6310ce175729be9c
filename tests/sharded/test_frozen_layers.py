"""What a frozen layer costs: no slots, no gradient that is reduced, no second gather."""

import keras
import numpy as np
import pytest

import tfparallel
from tests.helpers import assert_same_training, tiny_data, train
from tfparallel.internals.keras_layers import behind
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.sharded_variables import ShardedVariable

pytestmark = pytest.mark.turns

WIDTH = 6
KERNEL = WIDTH * WIDTH + WIDTH


def sharded(**options):
    return tfparallel.ShardedStrategy(["CPU:0", "CPU:1"], **{"min_size": 1, **options})


def frozen_then_trained(num_frozen: int = 2):
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(num_frozen)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(WIDTH)])
    for layer in layers:
        layer.trainable = False
    return model


def with_lora():
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(4)])
    for layer in layers:
        layer.enable_lora(2, a_initializer="glorot_uniform", b_initializer="glorot_uniform")
    return model


@pytest.fixture
def traffic(monkeypatch):
    """Numbers that one replica's step reduces, and gathers, while it is traced."""
    counted = {"reduced": 0, "gathered": 0}
    reduce, wholes = ShardedExtended._reduce_scatter, ShardedExtended._wholes

    def spy_reduce(self, padded):
        counted["reduced"] += sum(each.shape[0] for each in padded)
        return reduce(self, padded)

    def spy_wholes(self, variables, parts, i, *options):
        counted["gathered"] += sum(variable.shards.size for variable in variables)
        return wholes(self, variables, parts, i, *options)

    monkeypatch.setattr(ShardedExtended, "_reduce_scatter", spy_reduce)
    monkeypatch.setattr(ShardedExtended, "_wholes", spy_wholes)
    return counted


def traced(strategy, build, traffic):
    """The model, after what a step of one of the two replicas is counted alone."""
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.Adam(), "mse")
        model.optimizer.build(model.trainable_variables)
    x = np.zeros((4, WIDTH), "float32")
    y = np.zeros((4, model.output_shape[-1]), "float32")
    model.train_on_batch(x, y)  # Keras traces a first step that builds
    traffic.update(reduced=0, gathered=0)
    model.make_train_function(force=True)
    model.train_on_batch(x, y)
    return model, {key: number // 2 for key, number in traffic.items()}


def test_frozen_layers_have_no_slots_and_no_reduction(traffic):
    model, counted = traced(sharded(), frozen_then_trained, traffic)
    slots = [v for v in model.optimizer.variables if isinstance(behind(v), ShardedVariable)]
    assert sum(int(np.prod(slot.shape)) for slot in slots) == 2 * KERNEL
    assert counted["reduced"] == KERNEL
    assert counted["gathered"] == 2 * KERNEL + 2 * KERNEL  # frozen once, trained twice


@pytest.mark.parametrize("options", [{}, {"units": ()}, {"shard": "gradients"}])
def test_lora_reduces_its_own_weights_alone(options, traffic):
    model, counted = traced(sharded(**options), with_lora, traffic)
    trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_variables)
    assert counted["reduced"] == trained
    assert trained < model.count_params()


@pytest.mark.parametrize("build", [frozen_then_trained, with_lora])
@pytest.mark.parametrize("options", [{}, {"units": ()}, {"shard": "optimizer"}])
def test_they_train_as_on_one_device(build, options):
    def data(rows):
        x, _ = tiny_data(rows)
        x = np.resize(x, (rows, WIDTH))
        return x, x[:, : build().output_shape[-1]]

    each = {
        "build": build,
        "compile_options": lambda: {"loss": "mse"},
        "data": data,
        "optimizer": keras.optimizers.Adam,
    }
    assert_same_training(train(None, **each), train(sharded(**options), **each))
