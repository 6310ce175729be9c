"""The layers that random models are made of: what each needs, gives, and is in Keras."""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras

from tests.random_models.spec import Layer, Model, Nested, Shape

VOCABULARY = 7
TOKENS = 4  # in a row


class Kind(NamedTuple):
    """A kind of layer.

    Attributes:
        takes: whether it can be called with values of these shapes.
        gives: the shape of what it returns.
        make: the Keras layer, of the options of a `Layer`.
        options: for each option the values to choose from.
    """

    takes: Callable[..., bool]
    gives: Callable[..., Shape]
    make: Callable[..., keras.layers.Layer]
    options: dict[str, tuple]


@keras.saving.register_keras_serializable("random_models")
class AddsLoss(keras.layers.Layer):
    """Adds a mean over its input to the loss.

    In the dtype of compiled losses: Keras adds no float16 to those.
    """

    def call(self, x):
        mean = keras.ops.mean(keras.ops.square(x))
        self.add_loss(0.1 * keras.ops.cast(mean, keras.config.floatx()))
        return x


def _rank(rank: int) -> Callable[[Shape], bool]:
    return lambda shape: len(shape) == rank


def _any(shape: Shape) -> bool:
    return True


def _same(shape: Shape, *_, **__) -> Shape:
    return shape


@keras.saving.register_keras_serializable("random_models")
class WideL2(keras.regularizers.L2):
    """L2 in the dtype of compiled losses: Keras adds no float16 or bfloat16 to those."""

    def __call__(self, x):
        return keras.ops.cast(super().__call__(x), keras.config.floatx())


def _dense(units, activation, regularizer, trainable):
    is_wide = keras.config.dtype_policy().compute_dtype in ("float32", "float64")
    l2 = "l2" if is_wide or regularizer != "activity_regularizer" else WideL2()
    return keras.layers.Dense(units, activation, trainable=trainable, **{regularizer: l2})


def _recurrent(kind, units, return_sequences):
    return getattr(keras.layers, kind)(units, return_sequences=return_sequences)


def _batch_norm(**options):
    away_from_identity = keras.initializers.RandomUniform(0.5, 1.5, seed=3)
    return keras.layers.BatchNormalization(
        gamma_initializer=away_from_identity,
        moving_mean_initializer=away_from_identity,
        moving_variance_initializer=away_from_identity,
        **options,
    )


def _merge(kind):
    return getattr(keras.layers, kind)()


def _alike(*shapes: Shape) -> bool:
    return len(set(shapes)) == 1 and len(shapes) > 1


KINDS: dict[str, Kind] = {
    "dense": Kind(
        _any,
        lambda shape, units, **_: (*shape[:-1], units),
        _dense,
        {
            "units": (3, 4),
            "activation": ("tanh", "relu", "gelu"),
            "regularizer": ("kernel_regularizer", "bias_regularizer", "activity_regularizer"),
            "trainable": (True, True, True, False),
        },
    ),
    "conv1d": Kind(
        _rank(2),
        lambda shape, filters: (shape[0], filters),
        lambda filters: keras.layers.Conv1D(filters, 2, padding="same", activation="tanh"),
        {"filters": (3, 4)},
    ),
    "conv2d": Kind(
        _rank(3),
        lambda shape, filters: (*shape[:2], filters),
        lambda filters: keras.layers.Conv2D(filters, 2, padding="same", activation="tanh"),
        {"filters": (2, 3)},
    ),
    "recurrent": Kind(
        _rank(2),
        lambda shape, units, return_sequences, **_: (
            (shape[0], units) if return_sequences else (units,)
        ),
        _recurrent,
        {"kind": ("LSTM", "GRU"), "units": (3, 4), "return_sequences": (True, False)},
    ),
    "layer_norm": Kind(_any, _same, keras.layers.LayerNormalization, {}),
    "batch_norm": Kind(_any, _same, _batch_norm, {"synchronized": (True,)}),
    "own_batch_norm": Kind(_any, _same, _batch_norm, {"synchronized": (False,)}),
    "frozen_batch_norm": Kind(_any, _same, _batch_norm, {"trainable": (False,)}),
    "dropout": Kind(
        _any, _same, lambda rate: keras.layers.Dropout(rate, seed=5), {"rate": (0.2, 0.5)}
    ),
    "adds_loss": Kind(_any, _same, AddsLoss, {}),
    "reshape": Kind(
        lambda shape: len(shape) == 1 and shape[0] % 2 == 0,
        lambda shape: (2, shape[0] // 2),
        lambda: keras.layers.Reshape((2, -1)),
        {},
    ),
    "repeat": Kind(_rank(1), lambda shape: (3, shape[0]), lambda: keras.layers.RepeatVector(3), {}),
    "flatten": Kind(
        lambda shape: len(shape) > 1,
        lambda shape: (math.prod(shape),),
        keras.layers.Flatten,
        {},
    ),
    "average_1d": Kind(
        _rank(2), lambda shape: (shape[1],), keras.layers.GlobalAveragePooling1D, {}
    ),
    "average_2d": Kind(
        _rank(3), lambda shape: (shape[2],), keras.layers.GlobalAveragePooling2D, {}
    ),
    "max_2d": Kind(
        lambda shape: len(shape) == 3 and min(shape[:2]) > 1,
        lambda shape: (shape[0] // 2, shape[1] // 2, shape[2]),
        keras.layers.MaxPooling2D,
        {},
    ),
    "merge": Kind(_alike, _same, _merge, {"kind": ("Add", "Multiply", "Average", "Maximum")}),
    "concatenate": Kind(
        _alike,
        lambda *shapes: (*shapes[0][:-1], sum(shape[-1] for shape in shapes)),
        keras.layers.Concatenate,
        {},
    ),
    "attention": Kind(
        lambda *shapes: _alike(*shapes) and len(shapes[0]) == 2,
        lambda *shapes: shapes[0],
        lambda: keras.layers.MultiHeadAttention(2, 2),
        {},
    ),
    "embedding": Kind(
        _any,
        lambda shape, mask_zero: (TOKENS, 3),
        lambda mask_zero: keras.layers.Embedding(VOCABULARY, 3, mask_zero=mask_zero),
        {"mask_zero": (True, False)},
    ),
}


def shape_of(layer: Layer | Nested, *shapes: Shape) -> Shape:
    """What `layer` gives when called with values of `shapes`."""
    if isinstance(layer, Nested):
        (shape,) = shapes
        for each in layer.layers:
            shape = shape_of(each, shape)
        return shape
    return KINDS[layer.kind].gives(*shapes, **layer.options)


def shapes_of(model: Model) -> list[Shape]:
    """The shapes of all values of `model`."""
    shapes = list(model.inputs)
    for node in model.nodes:
        layer = node.layer if node.again is None else model.nodes[node.again].layer
        shapes.append(shape_of(layer, *(shapes[value] for value in node.values)))
    return shapes


def make(layer: Layer | Nested, shape: Shape) -> keras.layers.Layer:
    """The Keras layer; `shape` is that of its first value."""
    if isinstance(layer, Nested):
        return _MAKE_NESTED[layer.kind](layer.layers, shape)
    return KINDS[layer.kind].make(**layer.options)


def _sequential(layers: tuple[Layer, ...], shape: Shape) -> keras.Model:
    return keras.Sequential([make(layer, shape) for layer in layers])


def _functional(layers: tuple[Layer, ...], shape: Shape) -> keras.Model:
    x = y = keras.Input(shape)
    for layer in layers:
        y = make(layer, shape)(y)
    if y.shape == x.shape:
        y = keras.layers.Add()([x, y])
    return keras.Model(x, y)


def _subclassed(layers: tuple[Layer, ...], shape: Shape) -> keras.Model:
    return Subclassed([make(layer, shape) for layer in layers])


_MAKE_NESTED = {
    "sequential": _sequential,
    "functional": _functional,
    "subclassed": _subclassed,
}


class Subclassed(keras.Model):
    """Calls layers one after another, in Python."""

    def __init__(self, layers: list):
        super().__init__()
        self.own_layers = layers

    def call(self, x):
        for layer in self.own_layers:
            x = layer(x)
        return x
