"""PipelineStrategy: an error in a layer names the layer and its stage, and ends the step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import tiny_compile_options, tiny_data
from tfparallel import PipelineStrategy

CPUS = [f"CPU:{i}" for i in range(3)]


class Fragile(layers.Layer):
    """Hands on its input, unless it holds a number of 100 or more, or is `cracked`."""

    cracked = False

    def call(self, x):
        if self.cracked:
            raise LookupError("the layer is cracked")
        tf.debugging.assert_less(x, 100.0, message="too large a number")
        return x


def _compiled_model():
    strategy = PipelineStrategy(CPUS, 2, partition=[["before"], ["fragile"], ["after"]])
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(6, name="before", kernel_initializer="identity"),
                Fragile(name="fragile"),
                layers.Dense(3, name="after"),
            ]
        )
        model.compile(optimizer="sgd", **tiny_compile_options())
    return model


def test_an_error_of_an_operation_names_layer_and_stage_and_training_goes_on():
    """In the first microbatch or the last one, while others are on their way."""
    model = _compiled_model()
    x, y = tiny_data(8)
    assert np.isfinite(model.train_on_batch(x, y)[0])
    weights = model.get_weights()
    for row in (0, -1):
        large = x.copy()
        large[row] = 1000.0
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            model.train_on_batch(large, y)
        assert "too large a number" in str(raised.value)
        assert "stage_1/fragile" in str(raised.value)
        for before, after in zip(weights, model.get_weights()):
            np.testing.assert_array_equal(before, after)  # no half of an update
    assert np.isfinite(model.train_on_batch(x, y)[0])


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes come with Python 3.11")
def test_an_error_while_a_layer_is_traced_names_layer_and_stage_once():
    model = _compiled_model()
    x, y = tiny_data(8)
    model.train_on_batch(x, y)  # or else Keras meets the error, as it builds the metrics
    model.get_layer("fragile").cracked = True
    with pytest.raises(LookupError, match="cracked") as raised:
        model.train_on_batch(x[:6], y[:6])  # traced anew
    assert raised.value.__notes__ == ["In layer 'fragile' on stage 1 of the pipeline."]
    model.get_layer("fragile").cracked = False
    assert np.isfinite(model.train_on_batch(x[:6], y[:6])[0])
