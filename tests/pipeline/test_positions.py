"""Embeddings of positions, as many as a batch is long: their entries are of no row."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import assert_same_training, train
from tfparallel import PipelineStrategy

LENGTH, ROWS, BATCH = 5, 7, 4  # the last batch is smaller: no shape says how many rows


class Positions(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = layers.Embedding(9, 4)

    def call(self, x):
        return x + self.embedding(tf.range(tf.shape(x)[1]))


def tokens(rows):
    rng = np.random.default_rng(0)
    return rng.integers(0, 7, (rows, LENGTH)), rng.integers(0, 3, rows)


@pytest.mark.parametrize("length", [LENGTH, None], ids=["known", "unknown"])
def test_a_length_that_the_batch_tells_trains_as_on_one_device(length):
    def build():
        inputs = keras.Input((length,), dtype="int32")
        x = layers.Embedding(7, 4, name="words")(inputs)
        x = layers.GlobalMaxPooling1D(name="pool")(Positions(name="positions")(x))
        return keras.Model(inputs, layers.Dense(3, name="head")(x))

    def options():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"optimizer": keras.optimizers.Adam(0.1), "loss": loss}  # squares what it adds up

    def trained(strategy):
        return train(strategy, build, options, tokens, rows=ROWS, batch_size=BATCH)

    partition = [["words", "positions"], ["pool", "head"]]
    pipeline = PipelineStrategy(["CPU:0", "CPU:1"], 2, partition=partition)
    assert_same_training(trained(None), trained(pipeline))
