"""With `seed_by="row"` Dropout and its kin train as plain Keras does on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.helpers import assert_same_training, train
from tests.hybrid.meshes import SIZES, hybrid
from tfparallel import HybridStrategy, PipelineOptions

pytestmark = pytest.mark.turns

MESHES = [*SIZES, {"data": 4}, {"data": 1}]


def dropping():
    """What draws: dropout of rows, of several for one, of channels, of attention, in a loop."""
    x = keras.Input((5, 6))
    y = layers.SpatialDropout1D(0.3, name="spatial")(x)
    y = layers.LSTM(8, dropout=0.3, return_sequences=True, name="lstm")(y)
    y = layers.Add()([y, layers.MultiHeadAttention(2, 4, dropout=0.3, name="attention")(y, y)])
    y = layers.Dropout(0.3, name="of_words")(keras.ops.reshape(y, (-1, 8)))
    y = keras.ops.reshape(y, (-1, 5 * 8))
    y = layers.Dense(8, "tanh", name="dense_0")(y)
    y = layers.AlphaDropout(0.2, noise_shape=(None, 1), name="alpha")(y)
    y = layers.GaussianNoise(0.2, name="noise")(layers.GaussianDropout(0.2, name="gaussian")(y))
    shared = layers.Dropout(0.5, name="shared")
    y = layers.Dense(6, "tanh", name="dense_1")(shared(y))
    return keras.Model(x, layers.Dense(3, name="dense_2")(shared(y)))


def sequences(rows):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 5, 6)).astype("float32"), random.integers(0, 3, rows)


def trained(strategy, **options):
    training = train(strategy, dropping, data=sequences, **options)
    states = [v.numpy() for v in training.model.variables if "seed" in v.path]
    training.extra = {f"seed/{i}": np.asarray(state) for i, state in enumerate(states)}
    return training


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        # (7, 3) leaves replicas without rows, and others with one.
        pytest.param(
            sizes, rows, marks=[] if (sizes, rows) == ({"data": 4}, (7, 3)) else pytest.mark.long
        )
        for sizes in MESHES
        for rows in [(26, 13), (7, 3)]
    ],
    ids=str,
)
def test_a_batch_and_a_seed_train_as_on_one_device(sizes, rows):
    options = {"rows": rows[0], "batch_size": rows[1]}
    reference = trained(None, **options)
    assert len(reference.extra) == 8
    assert_same_training(reference, trained(hybrid(sizes, seed_by="row"), **options))


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved_1f1b", "chunks_per_device": 2, "num_microbatches": 4},
        pytest.param({"rematerialize": "full"}, marks=pytest.mark.long),
        pytest.param({"schedule": "zero_bubble", "num_microbatches": 3}, marks=pytest.mark.long),
        pytest.param({"num_microbatches": 1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_options_of_a_pipeline_change_no_draw(options):
    strategy = hybrid({"data": 2, "pipeline": 2}, seed_by="row", **options)
    assert_same_training(trained(None), trained(strategy))


@pytest.mark.long
def test_several_steps_in_one_function_draw_one_after_the_other():
    def compile_options():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": loss, "steps_per_execution": 2}

    options = {"compile_options": compile_options}
    strategy = hybrid({"data": 2, "pipeline": 2}, seed_by="row")
    assert_same_training(trained(None, **options), trained(strategy, **options))


class OwnStep(keras.Model):
    """Which is traced for the variables that it makes before it runs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "pipeline": 2}], ids=str)
def test_a_step_of_ones_own_draws_by_row(sizes):
    def build():
        x = keras.Input((6,))
        y = layers.Dropout(0.3)(layers.Dense(8, "tanh")(x))
        return OwnStep(x, layers.Dense(3)(layers.Dropout(0.3)(layers.Dense(8, "tanh")(y))))

    def compile_options():
        return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

    options = {"build": build, "compile_options": compile_options}
    assert_same_training(train(None, **options), train(hybrid(sizes, seed_by="row"), **options))


def test_a_layer_that_draws_otherwise_is_refused_by_name():
    def build():
        return keras.Sequential(
            [keras.Input((6,)), layers.Reshape((3, 2, 1)), layers.RandomFlip(name="flip")]
        )

    strategy = HybridStrategy({"data": 4}, seed_by="row")
    with strategy.scope():
        model = build()
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'flip' .RandomFlip."):
        model.fit(np.ones((4, 6)), np.ones((4, 3, 2, 1)), verbose=0)


def test_a_draw_from_no_layer_is_refused():
    class Noisy(layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x))

    strategy = HybridStrategy({"data": 4}, seed_by="row")
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), Noisy(), layers.Dense(3)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="a draw from .* by something else"):
        model.fit(np.ones((4, 6)), np.ones((4, 3)), verbose=0)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="'rows'"):
        HybridStrategy({"data": 4}, seed_by="rows")


@pytest.mark.parametrize(
    ("argument", "belongs"),
    [
        ({"num_microbatches": 8}, r"pipeline=tfparallel.PipelineOptions\(num_microbatches=8\)"),
        ({"min_size": 1}, r"shard=tfparallel.Sharding\(min_size=1\)"),
        ({"seed": 1}, "Did you mean 'seed_by'"),
    ],
)
def test_an_argument_of_an_option_is_said_to_belong_there(argument, belongs):
    with pytest.raises(TypeError, match=belongs):
        HybridStrategy({"pipeline": 4}, **argument)


def test_what_is_computed_again_is_said_once():
    memory = tfparallel.MemoryPolicy("full")
    with pytest.raises(ValueError, match="Leave `memory` out, or both others"):
        HybridStrategy(
            {"pipeline": 4}, pipeline=PipelineOptions(4, rematerialize="full"), memory=memory
        )
