"""Where derivatives forward are exact, and where they are refused by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.helpers import assert_same_training, in_float64, train

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(6, 4)), RNG.normal(size=(6, 2))
DEVICES = ["CPU:0", "CPU:1"]


class OfWeights(keras.Model):
    """Forward gradients: https://arxiv.org/abs/2202.08587"""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        along = [tf.ones(weight.shape, weight.dtype) for weight in weights]
        with tf.autodiff.ForwardAccumulator([weight.value for weight in weights], along) as forward:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        slope = forward.jvp(loss)
        self.optimizer.apply([slope * each for each in along], weights)
        return {"loss": loss}


class OfInputs(keras.Model):
    """A penalty of how outputs change along inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
                y_pred = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y_pred - y) + tf.square(forward.jvp(y_pred)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def trained(kind, strategy):
    def build():
        x = keras.Input((4,))
        return kind(x, layers.Dense(2)(layers.Dense(5, "tanh")(x)))

    return train(
        strategy,
        build=build,
        compile_options=dict,
        data=lambda rows: (ROWS[0][:rows], ROWS[1][:rows]),
        rows=6,
        batch_size=5,
    )


@pytest.mark.parametrize("kind", [OfWeights, OfInputs])
def test_whole_models_follow(kind):
    with in_float64():
        mirrored = trained(kind, tfparallel.MirroredStrategy(DEVICES))
        assert_same_training(trained(kind, None), mirrored, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "make", "what"),
    [
        (OfWeights, lambda: tfparallel.PipelineStrategy(DEVICES, 2), "stages of a pipeline"),
        (OfInputs, lambda: tfparallel.PipelineStrategy(DEVICES, 2), "stages of a pipeline"),
        (OfWeights, lambda: tfparallel.ShardedStrategy(DEVICES, min_size=1), "weights in shards"),
    ],
)
def test_stages_and_shards_are_refused(kind, make, what):
    with pytest.raises(ValueError, match=rf"ForwardAccumulator, which cannot follow.*{what}"):
        trained(kind, make())
