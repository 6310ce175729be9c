"""The models of the matrix: each has layers for four stages, and something that can go wrong.

None has a weight whose gradient is zero but for rounding, such as the bias of attention's keys or
one before BatchNorm: Adam makes steps of that.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.helpers import tiny_data
from tfparallel.replicas.batch import split_rows


def plain():
    x = keras.Input((6,))
    y = layers.Dense(8, "tanh", name="dense_0")(x)
    y = layers.Dense(8, "tanh", name="dense_1")(y)
    y = layers.Add()([y, layers.Dense(8, "tanh", name="dense_2")(y)])
    return keras.Model(x, layers.Dense(3, name="dense_3")(y))


def masked():
    x = keras.Input((5,), dtype="int32")
    y = layers.Embedding(11, 8, mask_zero=True, name="embedding")(x)
    y = layers.LSTM(6, return_sequences=True, name="lstm")(y)
    y = layers.LSTM(6, name="lstm_1")(y)
    return keras.Model(x, layers.Dense(3, name="dense")(y))


def words(rows):
    random = np.random.default_rng(0)
    return random.integers(0, 11, (rows, 5)), random.integers(0, 3, rows)


def attending():
    x = keras.Input((5,), dtype="int32")
    y = layers.Embedding(11, 8, name="embedding")(x)
    attention = layers.MultiHeadAttention(4, 4, use_bias=False, name="attention")
    y = layers.Add()([y, attention(y, y)])
    y = layers.LayerNormalization(name="norm")(y)
    return keras.Model(x, layers.Dense(3, name="dense")(layers.GlobalAveragePooling1D()(y)))


def penalized():
    x = keras.Input((6,))
    y = layers.Dense(8, "tanh", kernel_regularizer="l2", name="dense")(x)
    y = layers.ActivityRegularization(0.01)(y)
    shared = layers.Dense(8, "relu", name="hidden", kernel_constraint="max_norm")
    return keras.Model(x, layers.Dense(3, name="scores")(shared(shared(y))))


def dropping():
    x = keras.Input((5, 6))
    y = layers.LSTM(8, dropout=0.3, return_sequences=True, name="lstm")(x)
    attention = layers.MultiHeadAttention(2, 4, dropout=0.3, use_bias=False, name="attention")
    y = layers.Add()([y, attention(y, y)])
    y = layers.Dense(8, "tanh", name="dense_0")(layers.Flatten()(y))
    y = layers.GaussianNoise(0.2, name="noise")(layers.Dropout(0.3, name="drop")(y))
    return keras.Model(x, layers.Dense(3, name="dense_1")(y))


def sequences(rows):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 5, 6)).astype("float32"), random.integers(0, 3, rows)


class InParts(layers.BatchNormalization):
    """On one device what BatchNorm is in a pipeline, with averages of whole batches."""

    def __init__(self, parts, **options):
        super().__init__(**options)
        self.parts = parts

    def call(self, x, training=None, mask=None):
        if not training:
            return super().call(x, training=training, mask=mask)
        normalized = []
        for start, end in split_rows(tf.shape(x)[0], self.parts, range(self.parts)):
            rows = x[start:end]
            mean, variance = tf.nn.moments(rows, [0])
            normalized.append((rows - mean) * tf.math.rsqrt(variance + self.epsilon))
        for average, value in zip(
            (self.moving_mean, self.moving_variance), tf.nn.moments(x, [0]), strict=True
        ):
            value = tf.cast(value, average.dtype)
            average.assign(average * self.momentum + value * (1 - self.momentum))
        return tf.concat(normalized, 0) * self.gamma + self.beta


def normalized(parts=None, synchronized=False):
    """With BatchNorm.

    Parts of one row are normalised to zeros, so that what goes on are the offsets: these begin
    away from zero, or the layers behind would have gradients that are zero but for rounding.

    Args:
        parts: of a batch that are normalised each for itself, on one device; None for none.
        synchronized: by all rows on all devices.
    """
    offsets = keras.initializers.RandomUniform(-0.5, 0.5, seed=1)
    options = {"momentum": 0.8, "beta_initializer": offsets, "name": "norm"}
    x = keras.Input((6,))
    y = layers.Dense(8, use_bias=False, name="dense_0")(
        x
    )  # BatchNorm would make a bias's gradient 0
    norm = InParts(parts, **options) if parts else None
    norm = norm or layers.BatchNormalization(synchronized=synchronized, **options)
    y = layers.Dense(8, "tanh", name="dense_1")(layers.Activation("tanh")(norm(y)))
    return keras.Model(x, layers.Dense(3, name="dense_2")(y))


class TwoOptimizers(keras.Model):
    """Its own loop over two optimizers, of which one has the last layer only."""

    def use(self, make):
        self.both = [make(), make()]

    def train_step(self, data):
        x, y = data
        first, last = self.both
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = first.scale_loss(loss)  # both scale alike
        weights = self.trainable_weights
        pairs = list(zip(tape.gradient(scaled, weights), weights, strict=True))
        first.apply_gradients(pairs[:-2])
        last.apply_gradients(pairs[-2:])
        return {"loss": loss}


def of_two_optimizers(make):
    x = keras.Input((6,))
    y = layers.Dense(8, "tanh", name="dense_0")(x)
    y = layers.Dense(8, "tanh", name="dense_1")(y)
    y = layers.Dense(8, "tanh", name="dense_2")(y)
    model = TwoOptimizers(x, layers.Dense(3, name="dense_3")(y))
    model.use(make)
    return model


def of_float16():
    half = {"activation": "tanh", "dtype": "mixed_float16"}
    x = keras.Input((6,))
    y = layers.Dense(8, name="dense_0", **half)(x)
    y = layers.Dense(8, name="dense_1", **half)(y)
    y = layers.Dense(8, name="dense_2", **half)(y)
    return keras.Model(x, layers.Dense(3, name="dense_3", dtype="float32")(y))


# What each is trained on.
DATA = {"masked lstm": words, "attention": words, "dropout": sequences}
MODELS = {
    "plain": plain,
    "masked lstm": masked,
    "attention": attending,
    "penalties": penalized,
    "dropout": dropping,
    "batch norm": normalized,
    "two optimizers": of_two_optimizers,
    "float16": of_float16,
}


def data_of(model):
    return DATA.get(model, tiny_data)
