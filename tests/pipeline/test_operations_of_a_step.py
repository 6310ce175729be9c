"""How much a pipeline writes down of a model, in operations, which no other process changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from benchmarks.tracing import noted_operations
from tests.helpers import cpu_mesh_of
from tfparallel import HybridStrategy, PipelineOptions, PipelineStrategy

BLOCKS = 8
LAYERS = [f"{kind}_{i}" for i in range(BLOCKS) for kind in ("conv", "norm", "relu")]
HALF = len(LAYERS) // 2


def build():
    model = keras.Sequential([keras.Input((4, 4, 3))])
    for i in range(BLOCKS):
        model.add(layers.DepthwiseConv2D(3, padding="same", name=f"conv_{i}"))
        model.add(layers.BatchNormalization(name=f"norm_{i}"))
        model.add(layers.ReLU(name=f"relu_{i}"))
    model.add(layers.GlobalAveragePooling2D(name="pool"))
    return model


def num_operations(strategy, build=build, optimizer="sgd", rows=6):
    """Of the first step of `fit`."""
    with strategy.scope():
        model = build()
        model.compile(optimizer, "mse", jit_compile=False)
    x, y = np.zeros((rows, 4, 4, 3), "float32"), np.zeros((rows, 3), "float32")
    with noted_operations() as operations:
        model.fit(x, y, batch_size=rows, verbose=0)
    return len(operations)


@pytest.mark.turns
def test_a_stage_is_written_down_once_in_each_direction():
    """Its backward pass is the graph that says what the forward pass has to keep."""
    partition = [LAYERS[:HALF], [*LAYERS[HALF:], "pool"]]
    pipeline = num_operations(PipelineStrategy(["CPU:0", "CPU:1"], 3, partition=partition))
    one_device = num_operations(tf.distribute.get_strategy())
    assert pipeline <= 1.8 * one_device


def dense():
    pool = layers.GlobalAveragePooling2D(name="pool")
    model = keras.Sequential([keras.Input((4, 4, 3)), pool])
    for i in range(BLOCKS):
        model.add(layers.Dense(3, name=f"dense_{i}"))
    return model


@pytest.mark.turns
def test_pipelines_beside_one_another_write_one_update_and_one_function_of_a_sum():
    options = PipelineOptions(3, partition=[["pool", "dense_[0-3]"], ["dense_[4-7]"]])
    one, two = (
        num_operations(
            HybridStrategy(cpu_mesh_of(data=n, pipeline=2), pipeline=options), dense, "adam"
        )
        for n in (1, 2)
    )
    assert two <= 1.3 * one
