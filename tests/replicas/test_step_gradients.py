"""Which steps are refused for what they do to gradients before an optimizer gets them."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.helpers import assert_same_training, in_float64, train
from tfparallel.replicas.step_build import build

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(6, 4)).astype("float32"), RNG.normal(size=(6, 2)).astype("float32")
TOKENS = RNG.integers(0, 7, (6, 5)), ROWS[1]


class Step(keras.Model):
    """Its step gives the optimizer `change(model, x, y, gradients)`."""

    change = None

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(type(self).change(self, x, y, gradients), self.trainable_variables)
        return {"loss": loss}


def dense(kind):
    x = keras.Input((4,))
    hidden = layers.BatchNormalization()(layers.Dense(8, "relu")(x))
    return kind(x, layers.Dense(2)(hidden))


def attention(kind):
    """Its bias of keys has a gradient that is rounding alone; that of its table is sparse."""
    x = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(7, 6)(x)
    hidden = layers.LayerNormalization()(layers.MultiHeadAttention(2, 3)(hidden, hidden))
    return kind(x, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


def as_they_are(model, x, y, gradients):
    return gradients


def scaled(model, x, y, gradients):
    return [2.0 * tf.convert_to_tensor(gradient) for gradient in gradients]


def centralised(model, x, y, gradients):
    """https://arxiv.org/abs/2004.01461"""
    return [g - tf.reduce_mean(g, range(len(g.shape) - 1), keepdims=True) for g in gradients]


def with_decay(model, x, y, gradients):
    return [g + 0.01 * w for g, w in zip(gradients, model.trainable_variables, strict=True)]


def only_finite(model, x, y, gradients):
    return [tf.where(tf.math.is_finite(gradient), gradient, 0.0) for gradient in gradients]


@tf.custom_gradient
def _reversed(values):
    return tf.identity(values), lambda gradient: -0.5 * gradient


def of_a_reversal(model, x, y, gradients):
    """https://arxiv.org/abs/1505.07818"""
    return _gradients_through(_reversed, model, x)


def _gradients_through(function, model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(function(model(x, training=True))))
    return tape.gradient(loss, model.trainable_variables)


def some_frozen(model, x, y, gradients):
    return [0.0 * gradients[0], *gradients[1:]]


def of_two_losses(model, x, y, gradients):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.abs(model(x, training=True)))
    others = tape.gradient(loss, model.trainable_variables)
    others = map(tf.convert_to_tensor, others)
    return [a + 0.3 * b for a, b in zip(gradients, others, strict=True)]


def of_a_teacher(model, x, y, gradients):
    with tf.GradientTape() as tape:
        y_pred = model(x, training=True)
        loss = tf.reduce_mean(tf.abs(y_pred - tf.stop_gradient(2 * y_pred + y)))
    return tape.gradient(loss, model.trainable_variables)


def of_sums_clipped(model, x, y, gradients):
    context = tf.distribute.get_replica_context()
    return tf.clip_by_global_norm(context.all_reduce("SUM", gradients), 0.1)[0]


def clipped_of_all_rows(model, x, y, gradients):
    x, y = tf.distribute.get_strategy().all_rows((x, y))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(keras.losses.mean_squared_error(y, model(x, training=True)))
    return tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.1)[0]


RIGHT = [
    *(as_they_are, scaled, centralised, with_decay, only_finite, some_frozen),
    *(of_two_losses, of_sums_clipped, clipped_of_all_rows, of_a_reversal, of_a_teacher),
]


def built(change, model=dense, batch=ROWS, declared=lambda model: model, loss="mse"):
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = declared(model(type("Step", (Step,), {"change": change})))
        model.compile(optimizer="adam", loss=loss)
        build(model, "fit", batch)
    return model


@pytest.mark.parametrize("change", RIGHT)
def test_what_is_linear_is_not_refused(change, caplog):
    assert built(change).built
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.turns
@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "mixed_bfloat16", "float64"])
def test_digits_are_no_difference(dtype):
    keras.config.set_dtype_policy(dtype)
    try:
        for model, batch in ((dense, ROWS), (attention, TOKENS)):
            built(as_they_are, model, batch)
            with pytest.raises(ValueError, match="clipped or normalised by hand"):
                built(clipped, model, batch)
    finally:
        keras.config.set_dtype_policy("float32")


def clipped(model, x, y, gradients):
    return [tf.clip_by_value(gradient, -0.01, 0.01) for gradient in gradients]


def clipped_far_away(model, x, y, gradients):
    """None of random rows are so large."""
    return [tf.clip_by_value(gradient, -100.0, 100.0) for gradient in gradients]


def clipped_each(model, x, y, gradients):
    return [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]


def clipped_together(model, x, y, gradients):
    return tf.clip_by_global_norm(gradients, 10.0)[0]


def signs(model, x, y, gradients):
    return [tf.sign(gradient) for gradient in gradients]


def normalised(model, x, y, gradients):
    return [gradient / (tf.norm(gradient) + 1e-8) for gradient in gradients]


def projected(model, x, y, gradients):
    """Of two tasks, the part that conflicts is left out: https://arxiv.org/abs/2001.06782"""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.abs(model(x, training=True) + y))
    other = tape.gradient(loss, model.trainable_variables)
    along = [tf.minimum(tf.reduce_sum(a * b), 0.0) for a, b in zip(gradients, other, strict=True)]
    squares = [tf.reduce_sum(tf.square(b)) + 1e-12 for b in other]
    return [a - p / s * b for a, p, s, b in zip(gradients, along, squares, other, strict=True)]


@tf.custom_gradient
def _clipping(values):
    return tf.identity(values), lambda gradient: tf.clip_by_value(gradient, -0.01, 0.01)


def clipped_on_the_way_back(model, x, y, gradients):
    """What comes back to a layer is divided by the number of a replica's rows."""
    return _gradients_through(_clipping, model, x)


def balanced(model, x, y, gradients):
    """Of a loss that is one number, whatever the rows."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True)))
        loss /= tf.stop_gradient(loss)
    return tape.gradient(loss, model.trainable_variables)


def clipped_later(model, x, y, gradients):
    is_first = model.optimizer.iterations < 1
    return [tf.where(is_first, g, c) for g, c in zip(gradients, clipped_each(*[0] * 3, gradients))]


WRONG = [clipped, clipped_far_away, clipped_each, clipped_together, signs, normalised, projected]
WRONG += [clipped_on_the_way_back, balanced, clipped_later]


@pytest.mark.parametrize("change", WRONG)
def test_what_is_not_is_refused(change):
    with pytest.raises(ValueError, match=r"what is linear.*MirroredStrategy, and model 'step.*'"):
        built(change)


@pytest.mark.turns
@pytest.mark.parametrize("change", [clipped_far_away, clipped_each, clipped_together, normalised])
def test_norms_of_which_one_gradient_makes_nearly_all_are_refused(change):
    with pytest.raises(ValueError, match="what is linear"):
        built(change, attention, TOKENS)


def test_gradients_that_cannot_be_tried_are_said_to_be_taken_for_linear(caplog):
    def not_finite(model, x, y, gradients):
        return [tf.math.log(-1.0 - tf.abs(gradient)) for gradient in gradients]

    with caplog.at_level(logging.WARNING):
        built(not_finite)
    assert "train_step of model 'step" in caplog.text
    assert "gradients cannot be tried on random rows (ArithmeticError" in caplog.text


def test_what_is_declared_is_not_tried():
    assert built(clipped, declared=tfparallel.mean_loss).built


def test_one_replica_has_all_rows():
    with tfparallel.OneDeviceStrategy("CPU:0").scope():
        model = dense(type("Step", (Step,), {"change": clipped}))
        model.compile(loss="mse")
        build(model, "fit", ROWS)
    assert model.built


@pytest.mark.parametrize("change", [as_they_are, scaled])
@pytest.mark.parametrize("loss", [tfparallel.mean_loss(keras.losses.Dice()), keras.losses.Dice()])
def test_a_loss_that_is_declared_or_gets_all_rows_is_not_tried(loss, change):
    assert built(change, loss=loss).built


@pytest.mark.turns
@pytest.mark.parametrize("change", [scaled, with_decay, of_two_losses])
def test_what_is_not_refused_trains_as_one_device(change):
    options = {
        "build": lambda: attention(type("Step", (Step,), {"change": change})),
        "compile_options": lambda: {"loss": "mse"},
        "data": lambda rows: (TOKENS[0][:rows], TOKENS[1][:rows]),
        "rows": 6,
        "batch_size": 5,
    }
    with in_float64():
        strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
        assert_same_training(train(None, **options), train(strategy, **options), atol=1e-9)
