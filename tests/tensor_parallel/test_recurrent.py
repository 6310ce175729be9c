"""RNNs by units: outputs, states and gradients are those of one device, and products are shared."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests import helpers
from tests.hybrid.meshes import cpu_mesh_of
from tests.tensor_parallel import test_graph, test_rules
from tests.tensor_parallel.layouts import LayoutOfAnything, cpu_mesh
from tfparallel.tensor_parallel import recurrence

pytestmark = pytest.mark.turns

COLUMN = (None, "model")
KERNELS = {"one.*/kernel": COLUMN, "one.*/recurrent_kernel": COLUMN}
UNITS = {**KERNELS, "one.*/bias": ("model",)}  # of an LSTM; a GRU has two biases, as rows
GRU_UNITS = {**KERNELS, "one.*/bias": COLUMN}


def _rnn(kind, **options):
    inits = {"bias_initializer": "normal", "dropout": 0.0, "seed": 3}
    return lambda: [kind(5, name="one", **{**inits, **options})]


def _masked(kind, **options):
    return lambda: [layers.Masking(0.0), *_rnn(kind, **options)()]


def _gaps():
    """Sequences with gaps at the begin, within and at the end."""
    x = test_rules._images(6, 3)
    x[0, :2] = x[1, 3] = x[2, 4:] = 0.0
    return x


CASES = {
    "lstm": (_rnn(layers.LSTM), (6, 3), UNITS),
    "lstm, all outputs, backwards": (
        _rnn(layers.LSTM, return_sequences=True, go_backwards=True),
        (6, 3),
        UNITS,
    ),
    "lstm, another activation, no bias": (
        _rnn(layers.LSTM, activation="relu", recurrent_activation="hard_sigmoid", use_bias=False),
        (6, 3),
        KERNELS,
    ),
    "lstm with gaps": (_masked(layers.LSTM, return_sequences=True), _gaps, KERNELS),
    "lstm with gaps, backwards": (_masked(layers.LSTM, go_backwards=True), _gaps, UNITS),
    "lstm with gaps of zeros": (
        _masked(layers.LSTM, return_sequences=True, zero_output_for_mask=True),
        _gaps,
        UNITS,
    ),
    "lstm with gaps of zeros, the last output": (
        _masked(layers.LSTM, zero_output_for_mask=True),
        _gaps,
        UNITS,
    ),
    "lstm that drops inputs": (_rnn(layers.LSTM, dropout=0.4), (6, 3), UNITS),
    "lstm that drops inputs and states": (
        _rnn(layers.LSTM, dropout=0.4, recurrent_dropout=0.3),
        (6, 3),
        UNITS,
    ),
    "gru": (_rnn(layers.GRU, return_sequences=True), (6, 3), GRU_UNITS),
    "gru with gaps": (_masked(layers.GRU, return_sequences=True), _gaps, KERNELS),
    "gru that drops inputs and states": (
        _rnn(layers.GRU, dropout=0.4, recurrent_dropout=0.3),
        (6, 3),
        GRU_UNITS,
    ),
    "gru without bias": (_rnn(layers.GRU, use_bias=False), (6, 3), KERNELS),
    "gru that resets before it multiplies": (_rnn(layers.GRU, reset_after=False), (6, 3), UNITS),
    "simple rnn that drops inputs and states": (
        _rnn(layers.SimpleRNN, dropout=0.4, recurrent_dropout=0.3),
        (6, 3),
        UNITS,
    ),
    "rnn of a cell": (
        lambda: [layers.RNN(layers.LSTMCell(5, name="one_cell"), unroll=True)],
        (6, 3),
        UNITS,
    ),
    "rnn of cells": (
        lambda: [layers.RNN([layers.GRUCell(5, name="one_a"), layers.GRUCell(4, name="one_b")])],
        (6, 3),
        GRU_UNITS,
    ),
    "both directions": (
        lambda: [layers.Bidirectional(layers.LSTM(5, return_sequences=True), name="one")],
        _gaps,
        UNITS,
    ),
}
BY_DEFAULT = {"lstm with gaps", "lstm that drops inputs and states", "gru with gaps"} | {
    "both directions",
    "rnn of a cell",
}
WHOLE = {"gru that resets before it multiplies", "rnn of cells"}


@pytest.fixture
def runs(monkeypatch):
    """How often a recurrence was computed in parts."""
    calls: list = []
    run = recurrence.Recurrence.run

    def counted(self, *args):
        calls.append(self)
        return run(self, *args)

    monkeypatch.setattr(recurrence.Recurrence, "run", counted)
    return calls


def _cases():
    return [
        pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.long]) for name in CASES
    ]


@pytest.mark.parametrize("name", _cases())
def test_outputs_and_gradients_are_those_of_one_device(name, runs):
    make, data, layouts = CASES[name]
    expected = test_rules._outcome(make, data, None)
    assert not runs
    received = test_rules._outcome(make, data, test_rules._strategy(layouts))
    assert bool(runs) == (name not in WHOLE)
    assert len(expected) == len(received)
    for one_device, parts in zip(expected, received, strict=True):
        np.testing.assert_allclose(parts, one_device, rtol=2e-5, atol=2e-6)


def _sequences(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6, 3)).astype("float32"), rng.integers(0, 3, rows)


def _of_both_kinds():
    inputs = keras.Input((6, 3))
    x = layers.LSTM(7, return_sequences=True, dropout=0.3, seed=1, name="one")(inputs)
    x = layers.Dense(6, name="between")(x)
    x, state = layers.GRU(5, return_state=True, name="two")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Add()([x, state])))


@pytest.mark.long
def test_a_layout_that_is_found_trains_an_rnn_by_units(runs):
    strategy = tfparallel.TensorParallelStrategy("auto", device_mesh=cpu_mesh(1, 3))
    candidate = helpers.train(strategy, build=_of_both_kinds, data=_sequences)
    one_device = helpers.train(None, build=_of_both_kinds, data=_sequences)
    helpers.assert_same_training(one_device, candidate, atol=5e-6)
    rows = {w.path.split("/", 1)[-1]: w.value.rows for w in candidate.model.layers[1].weights[:3]}
    assert [(r.dim, r.sizes, r.blocks) for r in rows.values()] == [
        (1, (12, 8, 8), 4),
        (1, (12, 8, 8), 4),
        (0, (12, 8, 8), 4),
    ]
    assert {each.sizes for each in runs} == {(3, 2, 2), (2, 2, 1)}
    table = str(strategy.summary(candidate.model))
    line = next(x.split() for x in table.splitlines() if x.startswith("one  "))
    assert line[1] == "column" and line[3:] == ["gather", "168", "gather", "168,", "sum", "168"]


@pytest.mark.long
@pytest.mark.parametrize("axis", ["shard", "pipeline"])
def test_gates_in_parts_are_in_pieces_of_shards_and_on_stages(axis):
    def build():
        inputs = keras.Input((6, 3))
        x = layers.LSTM(8, return_sequences=True, name="lstm")(inputs)
        return keras.Model(inputs, layers.Dense(3)(layers.GRU(6, name="gru")(x)))

    mesh = cpu_mesh_of(**{axis: 2, "model": 2})
    options = {"pipeline": tfparallel.PipelineOptions(2)}
    if axis == "shard":
        options = {"shard": tfparallel.Sharding("parameters", 1)}
    strategy = tfparallel.HybridStrategy(mesh, layout_map=LayoutOfAnything(mesh), **options)
    candidate = helpers.train(strategy, build=build, data=_sequences)
    one_device = helpers.train(None, build=build, data=_sequences)
    helpers.assert_same_training(one_device, candidate, atol=5e-6)
    kernel = candidate.model.layers[1].cell.kernel.value
    assert kernel.rows.sizes == (16, 16) and kernel.rows.blocks == 4
    assert len(kernel.stored.sizes) == (4 if axis == "shard" else 2)


def test_saved_files_hold_the_gates_in_keras_order(tmp_path):
    strategy = test_rules._strategy(UNITS)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 3)), layers.LSTM(5, name="one")])
    x = test_rules._images(6, 3)
    kernel = np.arange(60.0, dtype="float32").reshape(3, 20) / 60
    model.layers[0].cell.kernel.assign(kernel)
    np.testing.assert_array_equal(model.layers[0].cell.kernel.numpy(), kernel)
    first, _ = model.layers[0].cell.kernel.value.parts[0]
    np.testing.assert_array_equal(first[:, :6], kernel[:, [0, 1, 2, 5, 6, 7]])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(model(x), loaded(x), atol=1e-6)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(exported.serve(x), loaded(x), atol=1e-6)


def _penalty(strategy):
    """Gradients of the norm of a gradient, through all steps."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((4, 3)), layers.LSTM(5, name="one")])

    @tf.function
    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(model(x) ** 2)
            penalty = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(penalty, [v.value for v in model.trainable_variables])

    x = tf.constant(test_rules._images(4, 3))
    return [tf.convert_to_tensor(g).numpy() for g in step(x)]


@pytest.mark.long
def test_gradients_of_gradients_are_those_of_one_device(runs):
    received = _penalty(test_rules._strategy(UNITS))
    assert runs
    for one, other in zip(received, _penalty(None), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_each_device_multiplies_its_units():
    """Forward, of h and its gradient in the loop; of inputs and weights for all steps at once."""

    def make():
        return keras.Sequential(
            [keras.Input((6, 16)), layers.LSTM(16, return_sequences=True, name="one")]
        )

    layouts = {".*" + path: axes for path, axes in UNITS.items()}
    counts = test_graph._operations_that_run(layouts, make, (4, 6, 16))
    products = [
        sum(counts[i][kind] for kind in ("MatMul", "BatchMatMulV2", "BatchMatMul")) for i in (0, 1)
    ]
    assert products[0] == products[1] == 5
