"""Models whose own `train_step` looks at gradients, of weights in parts."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.conformance.cases.custom_training import AddsUpGradients
from tests.conformance.models import MODELS
from tests.helpers import assert_same_training, in_float64, train


class Scales(keras.Model):
    """Looks at the gradients of its replica."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients = [0.5 * tf.convert_to_tensor(gradient) for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def functional(kind):
    x = keras.Input((6,))
    return kind(x, layers.Dense(2)(layers.Dense(5, "tanh")(x)))


@pytest.mark.parametrize(
    "build",
    [lambda: functional(Scales), lambda: functional(AddsUpGradients).make_sums()],
    ids=["scales", "adds up"],
)
@pytest.mark.parametrize(
    "shard",
    ["parameters", *(pytest.param(s, marks=pytest.mark.long) for s in ("gradients", "optimizer"))],
)
def test_a_step_may_look_at_gradients_before_the_optimizer_does(build, shard):
    """They were None while the step was traced for the variables that it makes."""
    strategy = tfparallel.ShardedStrategy(["CPU:0", "CPU:1"], shard=shard, min_size=1)
    data = MODELS["values"].data
    options = {"data": data, "compile_options": lambda: {"loss": "mse"}, "rows": 8, "batch_size": 7}
    with in_float64():
        assert_same_training(
            train(None, build, **options), train(strategy, build, **options), atol=1e-9
        )
