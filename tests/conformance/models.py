"""Tiny models, one for each kind of layer or wiring that a strategy could get wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
from keras import layers

from tests import helpers


@dataclass(frozen=True)
class ModelCase:
    """How to build one model, what to compile it with, and data that suits it.

    Attributes:
        build: makes the model; called inside the strategy's scope.
        compile_options: loss and metrics; called inside the strategy's scope.
        data: gives `(x, y)`, numpy, for a number of rows.
    """

    build: Callable[[], keras.Model]
    compile_options: Callable[[], dict]
    data: Callable[[int], tuple]


MODELS: dict[str, ModelCase] = {}


def model(data: Callable[[int], tuple], compile_options: Callable[[], dict]) -> Callable:
    """Register a function as the builder of the model of its name."""

    def register(build: Callable[[], keras.Model]) -> Callable:
        MODELS[build.__name__] = ModelCase(build, compile_options, data)
        return build

    return register


# Data: three classes, or values of the same names.


def _features(*shape: int) -> Callable[[int], tuple]:
    def data(rows: int) -> tuple:
        rng = np.random.default_rng(0)
        return rng.normal(size=(rows, *shape)).astype("float32"), rng.integers(0, 3, rows)

    return data


def _tokens(rows: int) -> tuple:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, (rows, 5))
    length = rng.integers(1, 6, rows)
    return np.where(np.arange(5) < length[:, None], tokens, 0), rng.integers(0, 3, rows)


def _binary(rows: int) -> tuple:
    x, y = helpers.tiny_data(rows)
    return x, (y > 0).astype("float32")[:, None]


def _values(rows: int) -> tuple:
    x, _ = helpers.tiny_data(rows)
    return x, np.stack([x.sum(axis=1), (x**2).mean(axis=1)], axis=1)


def _dicts(rows: int) -> tuple:
    x, y = helpers.tiny_data(rows)
    return {"left": x, "right": x[:, :2] + 1}, {"class": y, "value": x.sum(axis=1, keepdims=True)}


def _tuples(rows: int) -> tuple:
    x, y = _dicts(rows)
    return (x["left"], x["right"]), (y["class"], y["value"])


def _value_options() -> dict:
    return {"loss": "mse", "metrics": ["mae"]}


def _binary_options() -> dict:
    return {"loss": "binary_crossentropy", "metrics": ["accuracy"]}


def _dict_options() -> dict:
    return {
        "loss": {
            "class": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "value": "huber",
        },
        "loss_weights": {"class": 1.0, "value": 0.3},
        "metrics": {"class": ["accuracy"], "value": ["mae", "mse"]},
    }


def _tuple_options() -> dict:
    options = _dict_options()
    return {name: [value["class"], value["value"]] for name, value in options.items()}


_class_options = helpers.tiny_compile_options


@model(helpers.tiny_data, _class_options)
def mlp():
    return helpers.tiny_model()


@model(_binary, _binary_options)
def binary():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(1, "sigmoid")]
    )


@model(_values, _value_options)
def values():
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(2)])


@model(_features(8, 8, 1), _class_options)
def cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


@model(_features(8, 8, 4), _class_options)
def grouped_convolution():
    """Keras has XLA compile it, also for a CPU."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 4)),
            layers.Conv2D(6, 3, groups=2, activation="tanh"),
            layers.Reshape((36, 6)),
            layers.Conv1D(4, 3, groups=2, padding="causal", activation="tanh"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3),
        ]
    )


@model(_tokens, _class_options)
def embedding():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(20, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3),
        ]
    )


class _Positions(layers.Layer):
    """Adds a vector for each position, the same for every row."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.positions = layers.Embedding(5, 4)

    def call(self, x):
        return x + self.positions(keras.ops.arange(keras.ops.shape(x)[1]))


@model(_tokens, _class_options)
def positions():
    tokens = keras.Input((None,), dtype="int32")
    x = _Positions()(layers.Embedding(20, 4)(tokens))
    x = layers.Dense(6, activation="tanh")(x)
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


@model(helpers.tiny_data, _class_options)
def adapted():
    """A Normalization layer that has looked at the data first."""
    normalization = layers.Normalization()
    normalization.adapt(helpers.tiny_data(50)[0] * 3 + 1)
    return keras.Sequential([keras.Input((6,)), normalization, layers.Dense(3)])


@model(_features(5, 3), _class_options)
def lstm():
    return keras.Sequential([keras.Input((5, 3)), layers.LSTM(4), layers.Dense(3)])


@model(_features(5, 4), _class_options)
def attention():
    x = keras.Input((5, 4))
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=3)(x, x)
    normalized = layers.LayerNormalization()(layers.Add()([x, attended]))
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(normalized)))


@model(_features(4, 3), _class_options)
def shared_layers():
    x = keras.Input((4, 3))
    shared = layers.Dense(3, activation="tanh")
    first, second = shared(x[:, 0]), shared(x[:, 1])
    return keras.Model(x, layers.Dense(3)(layers.Concatenate()([first, second, shared(first)])))


@model(helpers.tiny_data, _class_options)
def nested():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh")], name="inner")
    x = keras.Input((6,))
    outer = keras.Sequential(
        [keras.Input((5,)), layers.Dense(4), layers.BatchNormalization(synchronized=True)],
        name="outer",
    )
    return keras.Model(x, layers.Dense(3)(outer(inner(x))))


@model(helpers.tiny_data, _class_options)
def nested_with_state():
    """Nested models, one with weights that do not train."""
    normalization = layers.Normalization()
    normalization.adapt(helpers.tiny_data(50)[0] * 3 + 1)
    inner = keras.Sequential([keras.Input((6,)), normalization, layers.Dense(5, "tanh")])
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3)(inner(x)))


@keras.saving.register_keras_serializable("tests")
class SubclassedModel(keras.Model):
    """Builds its layers itself and treats training apart."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(5, activation="tanh")
        self.scores = layers.Dense(3)

    def call(self, x, training=False):
        hidden = self.hidden(x)
        return self.scores(hidden * 0.5 if training else hidden)


@model(helpers.tiny_data, _class_options)
def subclassed():
    return SubclassedModel()


def _two_inputs(shape: Callable) -> keras.Model:
    left, right = keras.Input((6,), name="left"), keras.Input((2,), name="right")
    x = layers.Dense(5, activation="tanh")(layers.Concatenate()([left, right]))
    outputs = layers.Dense(3, name="class")(x), layers.Dense(1, name="value")(x)
    return keras.Model(shape(["left", "right"], [left, right]), shape(["class", "value"], outputs))


@model(_dicts, _dict_options)
def dict_inputs_and_outputs():
    return _two_inputs(lambda names, tensors: dict(zip(names, tensors, strict=True)))


@model(_tuples, _tuple_options)
def tuple_inputs_and_outputs():
    return _two_inputs(lambda names, tensors: list(tensors))


@model(_tokens, _class_options)
def masking():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(20, 4, mask_zero=True),
            layers.LSTM(4),
            layers.Dense(3),
        ]
    )


@model(helpers.tiny_data, _class_options)
def regularized():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(
                5,
                activation="tanh",
                kernel_regularizer="l2",
                bias_regularizer=keras.regularizers.L1(),
            ),
            layers.Dense(3, kernel_regularizer=keras.regularizers.L1L2(0.02, 0.03)),
        ]
    )


@model(helpers.tiny_data, _class_options)
def orthogonal():
    """Two regularizers have a tensor for a factor, each its own."""
    penalty = keras.regularizers.OrthogonalRegularizer
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, activation="tanh", kernel_regularizer=penalty(0.1)),
            layers.Dense(3, kernel_regularizer=penalty(0.1, mode="columns")),
        ]
    )


@keras.saving.register_keras_serializable("tests")
class MeanSquarePenalty(keras.layers.Layer):
    """Adds the mean square of its input to the loss: a mean over rows, as a loss is."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@model(helpers.tiny_data, _class_options)
def added_loss():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, "tanh"), MeanSquarePenalty(), layers.Dense(3)]
    )
