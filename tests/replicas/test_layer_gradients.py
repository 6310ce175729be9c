"""Which layers are refused for what they say of gradients, in Keras's own step."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.helpers import assert_same_training, in_float64, train
from tfparallel.replicas import step_build
from tfparallel.replicas.code_of_keras import is_code_of_keras
from tfparallel.replicas.step_build import build

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(6, 4)).astype("float32"), RNG.normal(size=(6, 2)).astype("float32")


def back(gradient):
    """An identity whose gradient is `gradient` of that of its output."""

    @tf.custom_gradient
    def function(x):
        return tf.identity(x), gradient

    return function


@tf.custom_gradient
def straight_through(x):
    return tf.sign(x), lambda upstream: tf.where(tf.abs(x) < 1, upstream, tf.zeros_like(upstream))


RIGHT = {
    "straight_through": straight_through,
    "reversed": back(lambda upstream: -0.5 * upstream),  # https://arxiv.org/abs/1505.07818
    "clipped_by_row": back(lambda upstream: tf.clip_by_norm(upstream, 1e-2, axes=[1])),
    "clipped_by_value": back(lambda upstream: tf.clip_by_value(upstream, -1e-2, 1e-2)),
    "normalised_by_row": back(lambda upstream: tf.math.l2_normalize(upstream, axis=1)),
    "recomputed": tf.recompute_grad(lambda x: tf.tanh(2.0 * x)),
    "of_keras": keras.ops.custom_gradient(lambda x: (2.0 * x, lambda upstream: 0.5 * upstream)),
}
WRONG = {
    "normalised": back(lambda upstream: upstream / tf.norm(upstream)),
    "clipped": back(lambda upstream: tf.clip_by_norm(upstream, 1e-3)),
    "clipped_far_away": back(lambda upstream: tf.clip_by_norm(upstream, 100.0)),
    "centred": back(lambda upstream: upstream - tf.reduce_mean(upstream, axis=0)),
    "by_row_and_batch": back(lambda upstream: upstream * tf.norm(upstream)),
}
NOT_OWN = [tf.nn.silu, tf.nn.relu6, tf.nn.log_softmax, keras.ops.softmax, tf.stop_gradient]


class Applies(layers.Layer):
    """Its function in training, an identity else."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x, training=False):
        return self.function(x) if training else x


class Subclassed(keras.Model):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = layers.Dense(8, "tanh"), layers.Dense(2), function

    def call(self, x):
        return self.last(self.function(self.first(x)))


def functional(function):
    x = keras.Input((4,))
    hidden = layers.BatchNormalization()(layers.Dense(8, "relu")(x))
    hidden = layers.Dropout(0.2)(Applies(function)(hidden))
    return keras.Model(x, layers.Dense(2)(hidden))


def activation(function):
    return keras.Sequential([layers.Dense(8, activation=function), layers.Dense(2)])


def built(make, loss="mse", declared=lambda model: model):
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = declared(make())
        model.compile(optimizer="sgd", loss=loss)
        build(model, "fit", ROWS)
    return model


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_of_rows_or_linear_is_not_refused(name, caplog):
    assert built(lambda: functional(RIGHT[name])).built
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", WRONG)
def test_what_couples_rows_is_refused(name):
    with pytest.raises(ValueError, match=r"MirroredStrategy, and model 'functional.*custom_grad"):
        built(lambda: functional(WRONG[name]))


@pytest.mark.parametrize("kind", [Subclassed, activation])
def test_wherever_it_is_called(kind):
    with pytest.raises(ValueError, match="what a layer says of gradients"):
        built(lambda: kind(WRONG["normalised"]))
    assert built(lambda: kind(RIGHT["reversed"])).built


def test_it_is_found_when_evaluation_has_built_the_model():
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = functional(WRONG["normalised"])
        model.compile(optimizer="sgd", loss="mse")
        build(model, "evaluate", ROWS)
        with pytest.raises(ValueError, match="what a layer says of gradients"):
            build(model, "fit", ROWS)


@pytest.mark.parametrize("loss", [keras.losses.Dice(), keras.losses.MeanSquaredError("sum")])
def test_it_is_found_whatever_the_loss_is(loss):
    """Of what replicas gather for a loss a trial knows nothing."""
    with pytest.raises(ValueError, match="what a layer says of gradients"):
        built(lambda: functional(WRONG["normalised"]), loss)
    assert built(lambda: functional(RIGHT["reversed"]), loss).built


def computed(loss_of):
    class Computed(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return loss_of(y, y_pred)

    def make():
        x = keras.Input((4,))
        return Computed(x, layers.Dense(2)(layers.Dense(8, "tanh")(x)))

    return make


def mean_square(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred))


def divided_by_itself(y, y_pred):
    loss = mean_square(y, y_pred)
    return loss / tf.stop_gradient(loss)


COMPUTED = {
    "normalised": lambda y, y_pred: mean_square(y, WRONG["normalised"](y_pred)),
    "number": lambda y, y_pred: RIGHT["clipped_by_value"](mean_square(y, y_pred)),
    "divided_by_itself": divided_by_itself,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_compute_loss_is_tried_too(name):
    with pytest.raises(ValueError, match=r"model 'computed.*tf\.custom_gradient"):
        built(computed(COMPUTED[name]))


def test_a_compute_loss_may_clip_by_row_or_have_a_teacher():
    for function in (RIGHT["clipped_by_value"], RIGHT["reversed"]):
        assert built(computed(lambda y, y_pred, f=function: mean_square(y, f(y_pred)))).built
    teacher = lambda y, y_pred: mean_square(tf.stop_gradient(y_pred), 2 * y_pred)  # noqa: E731
    assert built(computed(teacher)).built


def test_a_compute_loss_of_all_rows_has_no_custom_gradient():
    root = lambda y, p: tf.sqrt(mean_square(y, RIGHT["clipped_by_value"](p)))  # noqa: E731
    with pytest.raises(ValueError, match=r"model 'computed.*couples rows and has a tf\.custom"):
        built(computed(root))


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_digits_are_no_difference(dtype):
    keras.config.set_dtype_policy(dtype)
    try:
        built(lambda: functional(RIGHT["reversed"]))
        for name in ("centred", "normalised"):
            with pytest.raises(ValueError, match="what a layer says of gradients"):
                built(lambda name=name: functional(WRONG[name]))
    finally:
        keras.config.set_dtype_policy("float32")


def test_what_is_declared_is_not_tried():
    model = built(lambda: functional(WRONG["normalised"]), declared=tfparallel.mean_loss)
    assert model.built


def test_one_replica_has_all_rows():
    with tfparallel.OneDeviceStrategy("CPU:0").scope():
        model = functional(WRONG["normalised"])
        model.compile(loss="mse")
        build(model, "fit", ROWS)
    assert model.built


def test_a_model_without_a_strategy_may_be_built_to_be_backed_up():
    model = functional(WRONG["normalised"])
    model.compile(loss="mse")
    build(model, "fit", ROWS)
    assert model.built


@pytest.mark.parametrize("function", NOT_OWN)
def test_other_functions_cost_a_trace_of_the_model(function, monkeypatch):
    tried = []
    monkeypatch.setattr(step_build, "check_layer_gradients", lambda *args: tried.append(args))
    built(lambda: functional(function))
    built(lambda: functional(RIGHT["reversed"]))
    assert len(tried) == 1


def test_models_of_keras_cost_nothing():
    x = keras.Input((4,))
    attended = layers.MultiHeadAttention(2, 2)(layers.Reshape((2, 2))(x), layers.Reshape((2, 2))(x))
    inner = keras.Sequential([layers.Flatten(), layers.Dense(3, keras.activations.silu)])
    recurrent = layers.Bidirectional(layers.LSTM(2))(attended)
    output = keras.ops.concatenate([inner(attended), recurrent, keras.ops.relu6(x)], axis=1)
    model = keras.Model(x, layers.Dense(2, kernel_regularizer="l2")(output))
    assert is_code_of_keras(model)
    assert not is_code_of_keras(Subclassed(tf.tanh))
    assert not is_code_of_keras(activation(lambda x: x))
    assert not is_code_of_keras(keras.Sequential([x, layers.Lambda(lambda x: x)]))


def test_gradients_clipped_by_row_train_as_on_one_device():
    options = {
        "build": lambda: Subclassed(RIGHT["clipped_by_row"]),
        "compile_options": lambda: {"loss": "mse"},
        "data": lambda rows: (ROWS[0][:rows], ROWS[1][:rows]),
        "rows": 6,
        "batch_size": 5,
    }
    with in_float64():
        strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
        assert_same_training(train(None, **options), train(strategy, **options), atol=1e-9)
