"""Keras has variables of which the gradient is the next value: no sum over replicas is that."""

import keras
import numpy as np
import pytest

import tfparallel


def fit_in_float8(strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.quantize("float8")
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_float8_is_refused_where_replicas_have_parts_of_the_rows():
    with pytest.raises(ValueError, match=r"float8 training .*'sequential.*/dense.*', and"):
        fit_in_float8(tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]))
    fit_in_float8(tfparallel.OneDeviceStrategy("CPU:0"))
