"""Noise that a step adds to gradients: of one draw it is exact, of several it is named."""

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
ROWS = RNG.normal(size=(6, 4)), RNG.normal(size=(6, 2))


class Noisy(keras.Model):
    """Its step clips the gradient of each row, and adds noise to their mean.

    Source: Abadi et al., https://arxiv.org/abs/1607.00133
    """

    noise = None

    def __init__(self, **options):
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator(1)

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(self(x, training=True) - y), axis=1)
        by_row = tape.jacobian(losses, weights)
        flat = [
            tf.reshape(each, (tf.shape(x)[0], each.shape[1:].num_elements())) for each in by_row
        ]
        factors = tf.minimum(0.1 / tf.norm(tf.concat(flat, axis=1), axis=1), 1.0)
        clipped = [tf.einsum("n,n...->n...", factors, each) for each in by_row]
        gradients = [tf.reduce_mean(each, axis=0) for each in clipped]
        noisy = [g + type(self).noise(self, i, g) for i, g in enumerate(gradients)]
        self.optimizer.apply(noisy, weights)
        return {"loss": tf.reduce_mean(losses)}


def of_steps(model, i, gradient):
    seed = tf.stack([i, tf.cast(model.optimizer.iterations, tf.int32)])
    return 0.1 * tf.random.stateless_normal(gradient.shape, seed, dtype=gradient.dtype)


def of_an_operation(model, i, gradient):
    return 0.1 * tf.random.normal(gradient.shape, dtype=gradient.dtype)


def of_keras(model, i, gradient):
    return 0.1 * keras.random.normal(gradient.shape, dtype=gradient.dtype, seed=model.seed)


def model_with(noise):
    x = keras.Input((4,))
    hidden = layers.Dropout(0.3)(layers.Dense(5, "tanh")(x)) if noise is not of_steps else x
    kind = type("Noisy", (Noisy,), {"noise": noise})
    return kind(inputs=x, outputs=layers.Dense(2)(hidden))


def test_noise_of_a_seed_that_is_the_same_everywhere_is_that_of_one_device():
    options = {
        "build": lambda: model_with(of_steps),
        "compile_options": dict,
        "data": lambda rows: (ROWS[0][:rows], ROWS[1][:rows]),
        "rows": 6,
        "batch_size": 3,  # a replica without rows has no jacobian
    }
    with in_float64():
        strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
        assert_same_training(train(None, **options), train(strategy, **options), atol=1e-9)


@pytest.mark.parametrize("noise", [of_steps, of_an_operation, of_keras])
def test_draws_of_each_replica_are_named(noise, caplog):
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = model_with(noise)
        model.compile(optimizer="sgd")
        with caplog.at_level(logging.WARNING):
            build(model, "fit", [each.astype("float32") for each in ROWS])
    said = [x for x in caplog.messages if "draws for itself" in x]
    assert bool(said) == (noise is not of_steps)
