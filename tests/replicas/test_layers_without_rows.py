"""Loops of one's own over batches of fewer rows than there are replicas, on CPUs."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel.replicas.known_layers import layers_known_to

ROWS = np.random.default_rng(0).normal(size=(3, 8, 8, 2)).astype("float32")


def images() -> keras.Model:
    """What oneDNN cannot compute of no rows; the gradient of pooling ends the process."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


class Trainer:
    """A loop as programs outside of Keras's `fit` have it: a step that is a method."""

    def __init__(self, strategy: tf.distribute.Strategy):
        keras.utils.set_random_seed(1)
        self.strategy = strategy
        with strategy.scope():
            self.model = images()
            self.optimizer = keras.optimizers.SGD(0.01)

    def loss(self, x):
        return tf.reduce_sum(self.model(x, training=True) ** 2)

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss(x)
        weights = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    def train(self) -> list:
        """The weights after a batch of two rows, and one of one row."""
        step = tf.function(lambda x: self.strategy.run(self.step, (x,)))
        data = tf.data.Dataset.from_tensor_slices(ROWS).batch(2)
        for x in self.strategy.experimental_distribute_dataset(data):
            step(x)
        return self.model.get_weights()


def test_layers_of_a_loop_are_never_without_rows():
    """A convolution ended in "Incompatible shapes: [0,8,8,4] vs. [0,8,8,2]"."""
    one = Trainer(tfparallel.OneDeviceStrategy("CPU:0")).train()
    two = Trainer(tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])).train()
    for expected, received in zip(one, two, strict=True):  # oneDNN computes float32 only
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-5)


def test_layers_are_known_by_name_through_functions_and_objects():
    dense, inner = layers.Dense(1), layers.Dense(2)
    held = {"models": [keras.Sequential([keras.Input((3,)), inner])]}

    def forward(x):
        return held["models"][0](x)

    @tf.function
    def step(x):
        return dense(forward(x))

    known = layers_known_to(step)
    assert dense in known and inner in known
    assert layers_known_to(lambda x: tf.reduce_sum(x)) == []
