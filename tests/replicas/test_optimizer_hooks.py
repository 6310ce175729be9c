"""Where optimizers may be applied: replicas meet there."""

import keras
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import tiny_data, train


class EverySecondStep(keras.Sequential):
    """As programs for one device accumulate gradients."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)

        def update():
            self.optimizer.apply(gradients, self.trainable_weights)
            return 0

        tf.cond(self.optimizer.iterations % 2 == 0, update, lambda: 0)
        return {"loss": loss}


@pytest.mark.parametrize("kind", ["MirroredStrategy", "ShardedStrategy"])
def test_an_optimizer_in_a_branch_is_refused_and_told_of_accumulation(kind):
    def build():
        return EverySecondStep([keras.Input((6,)), keras.layers.Dense(3)])

    def data(rows):
        x, _ = tiny_data(rows)
        return x, x[:, :3]

    strategy = getattr(tfparallel, kind)(["CPU:0", "CPU:1"])
    with pytest.raises(RuntimeError, match=r"tf\.cond.*gradient_accumulation_steps=k"):
        train(strategy, build, lambda: {"loss": "mse"}, data)
