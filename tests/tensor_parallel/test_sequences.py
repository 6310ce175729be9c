"""`sequence_parallel=True`: what is between a row and a column is in parts along positions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests import helpers
from tests.tensor_parallel import test_graph, test_training
from tests.tensor_parallel.layouts import cpu_mesh, layout_map
from tfparallel.tensor_parallel import group

pytestmark = pytest.mark.turns


def _strategy(parts, layouts=None, replicas=1):
    if layouts is None:
        mesh = cpu_mesh(replicas, parts)
        return tfparallel.TensorParallelStrategy("auto", device_mesh=mesh, sequence_parallel=True)
    layout = layout_map(replicas, parts, layouts)
    return tfparallel.TensorParallelStrategy(layout, sequence_parallel=True)


@pytest.fixture
def scattered(monkeypatch):
    """Shapes of the parts that reductions gave."""
    shapes: list = []
    scatter_sum = group.scatter_sum

    def noted(*args):
        parts = scatter_sum(*args)
        shapes.append([part.shape[1] for part in parts])
        return parts

    monkeypatch.setattr(group, "scatter_sum", noted)
    return shapes


@pytest.mark.parametrize(
    "parts, layouts",
    [
        pytest.param(2, test_training.TRANSFORMER, marks=pytest.mark.long),
        pytest.param(3, test_training.TRANSFORMER, marks=pytest.mark.long),
        pytest.param(2, None, marks=pytest.mark.long),
    ],
    ids=["two", "three", "auto"],
)
def test_a_transformer_trains_as_one_device(parts, layouts, scattered):
    """With five positions, Dropout, a clipped norm, and an Embedding in parts."""
    options = {
        "build": test_training._transformer,
        "data": test_training._tokens,
        "optimizer": test_training._adamw,
    }
    candidate = helpers.train(_strategy(parts, layouts), **options)
    helpers.assert_same_training(helpers.train(None, **options), candidate, atol=5e-6)
    assert scattered and all(sizes == ([3, 2] if parts == 2 else [2, 2, 1]) for sizes in scattered)


def _blocks():
    """A stream of two blocks: norm, column, row, Dropout, sum."""
    x = inputs = keras.Input((6, 8))
    for i in range(2):
        y = layers.LayerNormalization()(x)
        y = layers.Dense(16, "relu", name=f"up{i}")(y)
        y = layers.Dense(8, name=f"down{i}", bias_initializer="normal")(y)
        x = layers.Add()([x, layers.Dropout(0.2, seed=i)(y)])
    return keras.Model(inputs, x)


def test_norms_and_sums_of_terms_are_computed_on_both_devices():
    layouts = {".*up./kernel": (None, "model"), ".*down./kernel": ("model", None)}
    strategy = _strategy(2, layouts)
    counts = test_graph._operations_that_run(strategy, _blocks, (4, 6, 8))
    assert counts[0]["Rsqrt"] >= 1 and counts[1]["Rsqrt"] >= 1  # the first norm's input is whole
    assert counts[0]["AddN"] > 0 and counts[1]["AddN"] > 0


def test_gradients_of_wholes_and_parts_are_those_of_one_device():
    """What a user's tape reads in between is whole."""
    layouts = {".*up./kernel": (None, "model"), ".*down./kernel": ("model", None)}
    results = []
    for strategy in (None, _strategy(2, layouts)):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else tf.name_scope("one"):
            model = _blocks()
        x = tf.constant(np.random.default_rng(0).normal(size=(3, 6, 8)), tf.float32)

        @tf.function
        def step(x, model=model):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = model(x)
                loss = tf.reduce_sum(y**3) + tf.reduce_sum(tf.sin(y[:, 0]))
            return tape.gradient(loss, x)

        results.append(step(x).numpy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)
