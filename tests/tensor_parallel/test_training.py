"""Trainings that the conformance suite does not ask: each equals that of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests import helpers
from tests.tensor_parallel.layouts import LayoutOfAnything, LayoutOfImages, layout_map
from tests.tensor_parallel.penalties import PENALISED

pytestmark = pytest.mark.turns

HEADS = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
}
TRANSFORMER = {
    **HEADS,
    ".*tokens/embeddings": ("model", None),
    ".*up.?/kernel": (None, "model"),
    ".*down.?/kernel": ("model", None),
}


def _tokens(rows):
    rng = np.random.default_rng(0)
    return rng.integers(0, 20, (rows, 5)), rng.integers(0, 3, rows)


def _transformer(attention=lambda: layers.MultiHeadAttention(3, 4)):
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(21, 8, name="tokens")(tokens)
    for i in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, attention()(y, y, use_causal_mask=True)])
        y = layers.Dense(15, name=f"up{i}")(layers.LayerNormalization()(x))
        y = layers.Dropout(0.2, seed=i)(layers.Activation("gelu")(y))
        x = layers.Add()([x, layers.Dense(8, name=f"down{i}")(y)])
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def _strategy(layouts, replicas=1, parts=2):
    return tfparallel.TensorParallelStrategy(layout_map(replicas, parts, layouts))


def _assert_same(strategy, **options):
    helpers.assert_same_training(
        helpers.train(None, **options), helpers.train(strategy, **options), atol=5e-6
    )


def test_each_replica_computes_with_a_group_of_its_own_and_no_replica_with_the_first():
    strategy, groups = _strategy({}, replicas=2), []
    strategy.run(lambda: groups.append(strategy.extended.own_group()))
    assert groups == strategy.extended._groups
    assert len(groups) == 2
    assert strategy.extended.own_group() == groups[0]


def _adamw():
    return keras.optimizers.AdamW(0.01, global_clipnorm=0.1)


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_transformer_with_uneven_heads_and_units(parts):
    """Its Embedding is in parts, and the norm that clips is one device's (of rows not merged)."""
    _assert_same(
        _strategy(TRANSFORMER, parts=parts), build=_transformer, data=_tokens, optimizer=_adamw
    )


@pytest.mark.parametrize(
    ("kind", "masks"),
    [
        ("heads", "of positions"),
        ("groups", "causal"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("heads", "none"), ("heads", "causal"), ("groups", "none")]
        ),
    ],
)
def test_attention_drops_the_scores_that_one_device_drops(kind, masks):
    """Masks drawn by device would be others: an epoch apart by 1e-3."""

    def build():
        x = keras.Input((5, 8))
        if kind == "heads":
            attention = layers.MultiHeadAttention(4, 4, dropout=0.4, seed=1)
        else:
            attention = layers.GroupQueryAttention(4, 4, 2, dropout=0.4, seed=1)
        options = {"use_causal_mask": True} if masks == "causal" else {}
        y = layers.Masking()(x) if masks == "of positions" else x
        y = attention(y, y, **options)
        return keras.Model(x, layers.Dense(3)(layers.Flatten()(y)))

    def sequences(rows):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(rows, 5, 8)).astype("float32")
        x[::2, 3:] = 0
        return x, rng.integers(0, 3, rows)

    _assert_same(_strategy(HEADS), build=build, data=sequences)


@pytest.mark.parametrize("layouts", ["rows", "columns"])
@pytest.mark.parametrize("clipping", [{"clipnorm": 0.05}, {"global_clipnorm": 0.1}])
def test_norms_of_an_embedding_in_parts_are_of_rows_that_are_not_merged(layouts, clipping):
    """Of six tokens each row has some several times: merged, they would have another norm."""

    def build():
        table = layers.Embedding(6, 8, name="table")
        outer = [layers.GlobalAveragePooling1D(), layers.Dense(3, name="down")]
        return keras.Sequential([keras.Input((5,), dtype="int32"), table, *outer])

    def tokens(rows):
        rng = np.random.default_rng(0)
        return rng.integers(0, 6, (rows, 5)), rng.integers(0, 3, rows)

    axes = ("model", None) if layouts == "rows" else (None, "model")
    _assert_same(
        _strategy({".*embeddings": axes, ".*down/kernel": ("model", None)}),
        build=build,
        data=tokens,
        optimizer=lambda: keras.optimizers.SGD(0.5, **clipping),
    )


class Codebook(layers.Layer):
    """The nearest of its vectors, of which many rows take the same (a VQ-VAE's)."""

    def build(self, input_shape):
        self.vectors = self.add_weight(shape=(3, input_shape[-1]), name="vectors")

    def call(self, x):
        ops, stop = keras.ops, keras.ops.stop_gradient
        apart = ops.sum((x[:, None] - self.vectors) ** 2, axis=-1)
        chosen = ops.take(self.vectors, ops.argmin(apart, axis=-1), axis=0)
        self.add_loss(ops.mean((stop(chosen) - x) ** 2) + ops.mean((chosen - stop(x)) ** 2))
        return x + stop(chosen - x)


@pytest.mark.parametrize(("axes", "replicas"), [(("model", None), 2), ((None, "model"), 1)])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.RMSprop(0.01),
        lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
        lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
        lambda: keras.optimizers.Lamb(0.01),
    ],
    ids=["rmsprop", "clipnorm", "global_clipnorm", "lamb"],
)
def test_rows_taken_of_a_weight_in_parts_are_not_merged(axes, replicas, optimizer):
    def build():
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, "tanh"), Codebook(name="code"), layers.Dense(3)]
        )

    strategy = _strategy({".*code/vectors": axes}, replicas)
    with helpers.in_float64():
        _assert_same(strategy, build=build, optimizer=optimizer)


def test_two_replicas_of_a_transformer_clipped_by_norm():
    """Without Dropout, whose masks differ by replica."""

    def build():
        model = _transformer()
        for layer in model.layers:
            if isinstance(layer, layers.Dropout):
                layer.rate = 0.0
        return model

    _assert_same(_strategy(TRANSFORMER, 2, 2), build=build, data=_tokens)


def test_grouped_queries_by_heads():
    def build():
        return _transformer(lambda: layers.GroupQueryAttention(4, 4, 2))

    _assert_same(_strategy(TRANSFORMER), build=build, data=_tokens)


def test_attention_that_drops_scores_draws_the_mask_of_one_device():
    def build():
        return _transformer(lambda: layers.MultiHeadAttention(3, 4, dropout=0.3, seed=3))

    _assert_same(_strategy(TRANSFORMER), build=build, data=_tokens)


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor", "muon"])
def test_optimizers_that_look_at_the_whole_matrix(optimizer):
    """They get it, and each part keeps its own rows of what they assign."""
    make = {
        "lamb": keras.optimizers.Lamb,
        "adafactor": keras.optimizers.Adafactor,
        "muon": keras.optimizers.Muon,
    }[optimizer]
    layouts = {".*dense.*/kernel": (None, "model")}
    _assert_same(_strategy(layouts), optimizer=lambda: make(0.01))


def test_max_norm_is_of_the_whole_kernel():
    def build():
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(7, name="up", kernel_constraint=keras.constraints.MaxNorm(0.5, 1)),
                layers.Dense(3, name="down", kernel_regularizer="l2"),
            ]
        )

    _assert_same(
        _strategy({".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}), build=build
    )


def test_states_of_rows_go_on_from_batch_to_batch():
    """`stateful=True` is right where one replica has all rows."""

    def build():
        inputs = keras.Input(batch_shape=(12, 4, 3))
        return keras.Model(inputs, layers.Dense(3)(layers.LSTM(4, stateful=True)(inputs)))

    def data(rows):
        rng = np.random.default_rng(0)
        return rng.normal(size=(rows, 4, 3)).astype("float32"), rng.integers(0, 3, rows)

    layouts = {".*lstm_cell/(recurrent_)?kernel": (None, "model")}
    _assert_same(_strategy(layouts), build=build, data=data, rows=24, batch_size=12)


class OfUnknownShapes(keras.Sequential):
    """Its gradients have no first dim until they are computed."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        gradients = [
            tf.raw_ops.PlaceholderWithDefault(input=g, shape=[None, *g.shape[1:]])
            for g in tape.gradient(loss, weights)
        ]
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


@pytest.mark.parametrize("dim", [0, 1])
def test_a_gradient_whose_shape_is_not_known_is_in_parts(dim):
    def build():
        return OfUnknownShapes([keras.Input((6,)), layers.Dense(5, name="up"), layers.Dense(3)])

    layouts = {".*up/kernel": tuple("model" if i == dim else None for i in range(2))}
    options = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    _assert_same(_strategy(layouts), build=build, compile_options=lambda: options)


def test_a_custom_loop_computes_in_parts():
    """Layers around the first one in parts are hooked when it is called, without `fit`."""
    strategy = _strategy({".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)})
    with strategy.scope():
        hidden = layers.Activation("gelu")
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(7, name="up"), hidden, layers.Dense(3, name="down")]
        )
    x, _ = helpers.tiny_data(4)
    model(x)
    assert "call" in vars(hidden)
    expected = keras.Sequential.from_config(model.get_config())
    expected.set_weights(model.get_weights())
    np.testing.assert_allclose(strategy.run(model, (x,)), expected(x), atol=1e-6)


@pytest.mark.parametrize("of", PENALISED)
@pytest.mark.parametrize("layout", [LayoutOfAnything, LayoutOfImages])
def test_a_loss_that_has_gradients_in_it(layout, of):
    strategy = tfparallel.TensorParallelStrategy(layout(layout_map(1, 2, {}).device_mesh))
    with helpers.in_float64():
        _assert_same(strategy, **PENALISED[of])
