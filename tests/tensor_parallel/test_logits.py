"""Losses of logits in parts, and layers that are used both ways: each as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests import helpers
from tests.tensor_parallel import test_graph
from tests.tensor_parallel.layouts import layout_map
from tfparallel.internals import keras_integers

pytestmark = pytest.mark.turns

VOCABULARY = 11
TABLE = {".*tokens/embeddings": ("model", None)}


def _language_model(**options):
    """Predicts a token at each position, by the table that it looked tokens up in."""
    tokens = keras.Input((5,), dtype="int32")
    table = layers.ReversibleEmbedding(VOCABULARY, 6, name="tokens", **options)
    x = layers.Dense(6, "tanh", name="hidden")(table(tokens))
    return keras.Model(tokens, table(x, reverse=True))


def _texts(rows):
    rng = np.random.default_rng(0)
    return rng.integers(0, VOCABULARY, (rows, 5)), rng.integers(0, VOCABULARY, (rows, 5))


def _strategy(layouts, replicas=1, parts=2):
    return tfparallel.TensorParallelStrategy(layout_map(replicas, parts, layouts))


def _compiled(loss, **options):
    return lambda: {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, **loss),
        "weighted_metrics": [
            "accuracy",
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
        ],
        **options,
    }


def _assert_same(strategy, **options):
    helpers.assert_same_training(
        helpers.train(None, **options), helpers.train(strategy, **options), atol=5e-6
    )


@pytest.mark.parametrize(
    "replicas, parts, table, loss",
    [
        (1, 3, {}, {}),
        (2, 2, {"mask_zero": True}, {"ignore_class": 3}),
        (1, 2, {"tie_weights": False, "logit_soft_cap": 0.5}, {"reduction": "sum"}),
    ],
)
def test_a_language_model_of_one_table(replicas, parts, table, loss):
    """With weights of positions, global clipping and an Adam that sees the table's rows."""
    weights = np.random.default_rng(1).uniform(0.5, 2, (helpers.ODD_ROWS, 5)).astype("float32")
    is_tied = table.get("tie_weights", True)
    beside = {} if is_tied else {".*reverse_embeddings": (None, "model")}
    _assert_same(
        _strategy({**TABLE, **beside}, replicas, parts),
        build=lambda: _language_model(**table),
        data=_texts,
        compile_options=_compiled(loss),
        optimizer=lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        sample_weight=weights,
    )


def test_a_table_by_vectors_sums_its_logits():
    layouts = {".*tokens/embeddings": (None, "model")}
    _assert_same(
        _strategy(layouts),
        build=lambda: _language_model(logit_soft_cap=2.0),
        data=_texts,
        compile_options=_compiled({}),
    )


def _classes(rows):
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")
    return x, np.random.default_rng(1).integers(0, VOCABULARY, (rows, 1))


def _classifier():
    return keras.Sequential([keras.Input((6,)), layers.Dense(VOCABULARY, name="scores")])


SCORES = {".*scores/kernel": (None, "model"), ".*scores/bias": ("model",)}


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_labels_with_a_last_dim_and_large_logits(scale):
    def data(rows):
        x, y = _classes(rows)
        return scale * x, y

    _assert_same(
        _strategy(SCORES, parts=3),
        build=_classifier,
        data=data,
        compile_options=_compiled({}),
        optimizer=lambda: keras.optimizers.SGD(0.1 / scale),
    )


def test_no_device_has_the_whole_logits():
    """What would make it is a concatenation: none runs, forward or backward."""
    strategy = _strategy(SCORES)
    with strategy.scope():
        model = _classifier()
        model.compile("sgd", **_compiled({})())
    x, y = map(tf.constant, _classes(12))
    model.fit(x, y, batch_size=12, verbose=0)
    step = tf.function(lambda: strategy.run(model.train_step, ((x, y),)))
    step.get_concrete_function()
    with test_graph._recorded() as graphs:
        step()
    operations = [test_graph._operation(node) for graph in graphs for node in graph.node]
    assert operations.count("MatMul") == 4  # forward and the kernel's gradient, on two devices
    assert operations.count("ConcatV2") == 0


def test_a_label_outside_of_the_vocabulary_is_an_error_as_on_one_device():
    strategy = _strategy(SCORES)
    with strategy.scope():
        model = _classifier()
        model.compile("sgd", **_compiled({})())
    x, y = _classes(12)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Expected indices in"):
        model.fit(x, y + VOCABULARY, verbose=0)


def _computed_model():
    words = keras.Input((5,), dtype="int32")
    tokens = layers.Lambda(lambda x: x * 2 % 16 // 2)(words)  # the same, if below 8
    x = layers.Embedding(VOCABULARY, 6, name="tokens")(tokens)
    return keras.Model(words, layers.Dense(VOCABULARY, name="scores")(x))


COMPUTED = {**TABLE, ".*scores/kernel": (None, "model")}


def test_what_gpus_compute_is_looked_up_as_on_one_device(monkeypatch):
    """Nobody asks a GPU about its tokens and labels: those that are none give NaN."""

    def data(rows):
        x, y = _texts(rows)
        return x % 8, y

    options = {
        "build": _computed_model,
        "compile_options": _compiled({"ignore_class": 3}),
        "data": data,
    }
    expected = helpers.train(None, **options)
    monkeypatch.setattr(keras_integers, "has_gpu", lambda devices: True)
    helpers.assert_same_training(expected, helpers.train(_strategy(COMPUTED), **options), atol=5e-6)


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
def test_a_label_on_a_gpu_that_is_none_gives_nan_as_on_one(monkeypatch, wrong):
    monkeypatch.setattr(keras_integers, "has_gpu", lambda devices: True)
    strategy = _strategy(COMPUTED)
    with strategy.scope():
        model = _computed_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
        model.compile("sgd", loss)
    x, y = _texts(8)
    y[0, 0] = wrong
    history = model.fit(x % 8, y, batch_size=8, verbose=0)
    assert np.isnan(history.history["loss"]).all()
    assert np.isnan(model.get_weights()[-1]).all()  # so that nobody goes on without noticing


def test_auto_cuts_a_table_that_is_used_both_ways_by_its_tokens():
    mesh = layout_map(1, 2, {}).device_mesh
    strategy = tfparallel.TensorParallelStrategy("auto", device_mesh=mesh)
    with strategy.scope():
        model = _language_model()
    lines = [line.split() for line in str(strategy.summary(model)).splitlines()]
    assert model.layers[1].embeddings.value.rows.dim == 0
    assert ["tokens", "tokens", "0.0%", "sum", "120", "-"] in lines
    assert ["tokens", "column", "64.7%", "gather", "120", "sum", "120"] in lines
