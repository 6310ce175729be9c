"""Convolutions that Keras has XLA compile, under replicas."""

import keras
import numpy as np

from tests.helpers import assert_same_training, train
from tfparallel import MirroredStrategy
from tfparallel.replicas import convolution_hooks


def _depthwise(kernel_size):
    return keras.layers.Conv2D(4, kernel_size, groups=4, padding="same", activation="tanh")


def _model():
    layers = [_depthwise(3), _depthwise(3), _depthwise(5), keras.layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((5, 6, 4)), *layers, keras.layers.Dense(3)])


def _data(rows):
    numbers = np.random.default_rng(0)
    return numbers.normal(size=(rows, 5, 6, 4)).astype("float32"), numbers.integers(0, 3, rows)


def _options():
    return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def _train(strategy):
    return train(strategy, _model, _options, _data, rows=8, batch_size=4)


def test_those_that_are_alike_are_traced_once_for_all_layers_and_replicas():
    known = convolution_hooks._shared.cache_info().misses
    shared = _train(MirroredStrategy(["CPU:0", "CPU:1"]))
    assert convolution_hooks._shared.cache_info().misses == known + 2  # a size of kernels each
    assert_same_training(_train(None), shared)


def test_eager_calls_share_one_where_that_is_asked_for():
    x, layer = np.float32(np.random.default_rng(0).normal(size=(2, 5, 7, 4))), _depthwise(3)
    expected = layer(x)
    convolution_hooks.hook_convolution(layer)
    known = convolution_hooks._shared.cache_info()
    outside = layer(x)
    assert convolution_hooks._shared.cache_info() == known
    with convolution_hooks.convolutions_shared():
        within = layer(x), layer(x)
    found = convolution_hooks._shared.cache_info()
    assert (found.misses, found.hits) == (known.misses + 1, known.hits + 1)
    for each in (outside, *within):
        np.testing.assert_allclose(each, expected, rtol=1e-6)
