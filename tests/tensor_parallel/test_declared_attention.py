"""Attention of other libraries, with rotations and groups of queries: by heads, as one device."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfparallel
from tests import helpers
from tests.tensor_parallel import test_gpt, test_graph
from tests.tensor_parallel.layouts import cpu_mesh, layout_map
from tfparallel.tensor_parallel import HeadsOf, attention_by_heads

pytestmark = pytest.mark.turns

POSITIONS, WIDTH, SIZE = 5, 12, 4
BY_ROWS = {  # as KerasHub's presets for Llama have it
    ".*(query|key|value)/kernel": ("model", None, None),
    ".*attention_output/kernel": ("model", None, None),
}
BY_HEADS = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
}


class Rotated(layers.Layer):
    """As Llama's of KerasHub: keys and values are repeated for the queries of a group."""

    def __init__(self, heads=4, groups=2, use_bias=False, rate=0.0):
        super().__init__(name="attention")
        self.heads, self.groups = heads, groups
        inner = {"query": heads, "key": heads // groups, "value": heads // groups}
        self.query, self.key, self.value = (
            layers.EinsumDense(
                "btm,mhs->bths", (None, n, SIZE), bias_axes="hs" if use_bias else None, name=name
            )
            for name, n in inner.items()
        )
        self.result = layers.EinsumDense("bths,hsm->btm", (None, WIDTH), name="attention_output")
        self.norm, self.dropout = layers.RMSNormalization(name="norm"), layers.Dropout(rate, seed=1)

    def build(self, shape):
        for each in (self.query, self.key, self.value):
            each.build(shape)
        self.result.build((None, None, self.heads, SIZE))
        self.norm.build((None, None, None, SIZE))

    def _rotated(self, x):
        angles = ops.arange(POSITIONS, dtype=x.dtype)[:, None, None] * ops.ones(SIZE // 2, x.dtype)
        one, two = ops.split(x, 2, -1)
        cos, sin = ops.cos(angles), ops.sin(angles)
        return ops.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    def call(self, x, bias=None, cache=None, training=None):
        query, key = self._rotated(self.norm(self.query(x))), self._rotated(self.key(x))
        key, value = (ops.repeat(each, self.groups, 2) for each in (key, self.value(x)))
        scores = ops.einsum("bqhs,bkhs->bhqk", query, key)
        scores = scores if bias is None else scores + bias[:, None]
        mixed = ops.einsum("bhqk,bkhs->bqhs", ops.softmax(scores), value)
        return self.result(self.dropout(mixed, training=training))


class Reshaped(Rotated):
    """As Gemma's: queries are reshaped into groups, by numbers of heads."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kept = self.heads // self.groups

    def call(self, x, bias=None, cache=None):
        query = self._rotated(self.norm(self.query(x)))
        shape = ops.shape(query)
        grouped = ops.reshape(query, (*shape[:2], self.kept, self.heads // self.kept, SIZE))
        scores = ops.einsum("bqkgs,btks->bkgqt", grouped, self._rotated(self.key(x)))
        scores = scores if bias is None else scores + bias[:, None, None]
        mixed = ops.einsum("bkgqt,btks->bqkgs", ops.softmax(scores), self.value(x))
        return self.result(ops.reshape(mixed, (*shape[:2], self.heads, SIZE)))


NAMES = {"query": "query", "key": "key", "value": "value", "output": "result"}
attention_by_heads(Rotated, HeadsOf(**NAMES))
attention_by_heads(Reshaped, HeadsOf(**NAMES, counts={"heads": "query", "kept": "key"}))


def _sequences(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, POSITIONS, WIDTH)), rng.integers(0, 3, rows)


def _model(make):
    """With a bias of scores that is learned from the input, which has a gradient."""
    x = keras.Input((POSITIONS, WIDTH))
    y = layers.LayerNormalization()(x)
    bias = layers.Dense(POSITIONS, name="bias")(y)
    y = layers.Add()([x, make()(x=y, bias=bias)])
    return keras.Model(x, layers.Dense(3, name="scores")(layers.Flatten()(y)))


def _strategy(layouts, parts=2, replicas=1):
    if layouts == "auto":
        mesh = cpu_mesh(replicas, parts)
        return tfparallel.TensorParallelStrategy(layouts, device_mesh=mesh)
    return tfparallel.TensorParallelStrategy(layout_map(replicas, parts, layouts))


@pytest.mark.parametrize(
    ("layouts", "make", "replicas"),
    [
        (BY_ROWS, Rotated, 1),
        ("auto", lambda: Reshaped(heads=6, use_bias=True), 1),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("auto", lambda: Rotated(6, 2, use_bias=True), 1),
                (BY_HEADS, lambda: Rotated(use_bias=True), 2),
                (BY_HEADS, lambda: Rotated(6, 2, use_bias=True), 1),  # groups are divided: whole
                ("auto", lambda: Rotated(rate=0.3), 1),  # drops: whole
                ("auto", Reshaped, 2),
            ]
        ),
    ],
)
def test_trains_as_one_device(layouts, make, replicas):
    options = {
        "build": lambda: _model(make),
        "data": _sequences,
        "compile_options": lambda: {
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        },
    }
    with helpers.in_float64():
        candidate = helpers.train(_strategy(layouts, 2, replicas), **options)
        helpers.assert_same_training(helpers.train(None, **options), candidate, 1e-9)


@pytest.mark.parametrize("layouts", [BY_ROWS, BY_HEADS])
def test_scores_are_computed_where_their_heads_are(layouts):
    def make():
        x = keras.Input((POSITIONS, WIDTH))
        return keras.Model(x, Rotated(use_bias=layouts is BY_HEADS)(x))

    strategy = _strategy(layouts)
    counts = test_graph._operations_that_run(strategy, make, (4, POSITIONS, WIDTH))
    assert counts[0]["Softmax"] == counts[1]["Softmax"] == 1
    if layouts is BY_HEADS:
        assert counts[0]["ConcatV2"] == counts[1]["ConcatV2"]  # of rotations


def test_its_products_count_as_in_parts():
    strategy = _strategy("auto")
    with strategy.scope():
        model = _model(Rotated)
    table = str(strategy.summary(model))
    assert float(test_gpt.IN_PARTS.findall(table)[0]) >= 85
    assert any("heads" in line for line in table.splitlines())


class AndMore(Rotated):
    def call(self, x, bias=None, cache=None):
        return super().call(x, bias) * 2


def test_a_layer_that_computes_on_after_its_output_is_refused():
    attention_by_heads(AndMore, HeadsOf(**NAMES))
    strategy = _strategy(BY_HEADS)
    with strategy.scope():
        layer = AndMore(use_bias=True)
        layer.build((None, POSITIONS, WIDTH))
        with pytest.raises(TypeError, match="returns what its 'result' gives"):
            strategy.run(layer, (keras.random.normal((2, POSITIONS, WIDTH)),))


def test_logits_beside_a_table_are_laid_out_as_the_table():
    strategy = _strategy({"table/embeddings": ("model", None)})
    with strategy.scope():
        table = layers.ReversibleEmbedding(9, 4, tie_weights=False, name="table")
        table.build()
    parts = table.reverse_embeddings.value.parts[0]
    assert [tuple(part.shape) for part in parts] == [(4, 5), (4, 4)]
