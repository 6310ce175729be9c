"""Models whose loss has a gradient in it, as that of a WGAN-GP's critic has."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Penalised(keras.Model):
    """Outputs are not to change much with inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            squares = tf.square(inner.gradient(outputs, x))
            penalty = tf.reduce_mean(tf.reduce_sum(squares, range(1, len(x.shape))))
            scores = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            loss = tf.reduce_mean(scores) + penalty
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def _dense():
    x = keras.Input((6,))
    hidden = layers.LayerNormalization()(layers.Dense(7, "tanh", name="up")(x))
    return Penalised(x, layers.Dense(3, name="down")(hidden))


def _attention():
    x = keras.Input((5, 6))
    y = layers.LayerNormalization()(x)
    hidden = layers.Add()([x, layers.MultiHeadAttention(3, 4)(y, y)])
    hidden = layers.Dense(6, name="down")(layers.Dense(7, "gelu", name="up")(hidden))
    return Penalised(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)))


def _convolution():
    x = keras.Input((6, 6, 2))
    hidden = layers.Conv2D(5, 3, activation="tanh", name="up")(x)
    hidden = layers.Conv2D(4, 3, strides=2, padding="same", name="down")(hidden)
    return Penalised(x, layers.Dense(3)(layers.Flatten()(hidden)))


def _recurrence():
    x = keras.Input((4, 3))
    return Penalised(x, layers.Dense(3)(layers.LSTM(5, unroll=True)(x)))


def _data(*shape):
    def data(rows):
        rng = np.random.default_rng(0)
        return rng.normal(size=(rows, *shape)), rng.integers(0, 3, rows)

    return data


_OPTIONS = {
    "dense": (_dense, _data(6)),
    "attention": (_attention, _data(5, 6)),
    "convolution": (_convolution, _data(6, 6, 2)),
    "recurrence": (_recurrence, _data(4, 3)),
}
# What `helpers.train` is given for each of them.
PENALISED = {
    name: {"build": build, "data": data, "compile_options": dict}
    for name, (build, data) in _OPTIONS.items()
}
