"""PipelineStrategy: a U-Net, whose skip connections go past stages.

`benchmarks/pipeline_architectures.py` compares larger architectures, which take minutes.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import assert_same_training, train
from tfparallel import PipelineStrategy

pytestmark = pytest.mark.turns

CPUS = [f"CPU:{i}" for i in range(4)]
SIDE = 16


def masks(rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, SIDE, SIDE, 3)).astype("float32")
    return x, (x.mean(axis=3, keepdims=True) > 0).astype("float32")


def u_net():
    """Three halvings and back; what was before each halving skips to behind its doubling."""
    x = inputs = keras.Input((SIDE, SIDE, 3))
    skipped = []
    for i in range(3):
        x = layers.Conv2D(4 << i, 3, padding="same", activation="tanh", name=f"down_{i}")(x)
        skipped.append(x)
        x = layers.AveragePooling2D(2, name=f"pool_{i}")(x)
    x = layers.Conv2D(32, 3, padding="same", activation="tanh", name="bottom")(x)
    for i in reversed(range(3)):
        x = layers.UpSampling2D(2, name=f"rise_{i}")(x)
        x = layers.Concatenate(name=f"join_{i}")([x, skipped[i]])
        x = layers.Conv2D(4 << i, 3, padding="same", activation="tanh", name=f"up_{i}")(x)
    return keras.Model(inputs, layers.Conv2D(1, 1, name="scores")(x))


U_NET_STAGES = [
    ["down_0", "pool_0", "down_1", "pool_1"],
    ["down_2", "pool_2", "bottom"],
    ["rise_[12]", "join_[12]", "up_[12]"],
    ["rise_0", "join_0", "up_0", "scores"],
]
OPTIONS = {"rows": 10, "batch_size": 5, "epochs": 1}


def mask_options():
    return {"loss": keras.losses.BinaryCrossentropy(from_logits=True)}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_u_net_trains_as_on_one_device(schedule):
    options = {"build": u_net, "compile_options": mask_options, "data": masks, **OPTIONS}
    strategy = PipelineStrategy(CPUS, 3, schedule, U_NET_STAGES)
    assert_same_training(train(None, **options), train(strategy, **options))


def test_skip_connections_go_straight_to_the_stage_that_takes_them():
    """And so do their gradients: the stages in between take no part."""
    strategy = PipelineStrategy(CPUS, 2, partition=U_NET_STAGES)
    with strategy.scope():
        model = u_net()
        model.compile(optimizer="sgd", **mask_options())
        x, y = (tf.constant(array) for array in masks(4))
        model.optimizer.build(model.trainable_variables)
        model._symbolic_build(data_batch=(x, y, None))
        step = tf.function(lambda x, y: strategy.run(model.train_step, args=((x, y),)))
        operations = step.get_concrete_function(x, y).graph.get_operations()
    calls = [op for op in operations if op.type == "RemoteCall"]
    stage_of = {op: int(op.device[-1]) for op in calls}
    links = {
        (stage_of[tensor.op], stage_of[call], _shape(tensor), "backward" in call.name)
        for call in calls
        for tensor in call.inputs
        if tensor.op in stage_of and tensor.dtype == tf.float32
        if stage_of[tensor.op] != stage_of[call]
    }
    forward = {link[:3] for link in links if not link[3]}
    assert forward == {
        (0, 1, (SIDE // 4, SIDE // 4, 8)),
        (1, 2, (SIDE // 8, SIDE // 8, 32)),
        (1, 2, (SIDE // 4, SIDE // 4, 16)),  # down_2, to the next stage
        (0, 2, (SIDE // 2, SIDE // 2, 8)),  # down_1, past a stage
        (2, 3, (SIDE // 2, SIDE // 2, 8)),
        (0, 3, (SIDE, SIDE, 4)),  # down_0, past two
    }
    backward = {link[:3] for link in links if link[3] and link[0] > link[1]}
    assert {(s, t, shape) for t, s, shape in forward} == backward


def test_gradients_of_skip_connections_are_summed_on_the_stage_that_made_the_tensor():
    """A tensor that two later stages take: TensorFlow would add its gradients just anywhere."""
    x = inputs = keras.Input((6,))
    strategy = PipelineStrategy(CPUS, 2, partition=[["a"], ["b"], ["c", "join_c"], ["d*"]])
    with strategy.scope():
        a = layers.Dense(6, name="a")(x)
        b = layers.Dense(6, name="b")(a)
        c = layers.Dense(6, name="c")(layers.Add(name="join_c")([a, b]))
        d = layers.Dense(6, name="d")(layers.Add(name="d_join")([a, c]))
        model = keras.Model(inputs, d)
        model.compile(optimizer="sgd", loss="mse")
        x = y = tf.ones([4, 6])
        model.optimizer.build(model.trainable_variables)
        model._symbolic_build(data_batch=(x, y, None))
        step = tf.function(lambda x, y: strategy.run(model.train_step, args=((x, y),)))
        operations = step.get_concrete_function(x, y).graph.get_operations()
    calls = [op for op in operations if op.type == "RemoteCall" and "backward" in op.name]
    sums = [
        tensor.op for call in calls for tensor in call.inputs if tensor.op.type.startswith("Add")
    ]
    assert sums
    for operation in sums:
        assert {call.device for call in operation.outputs[0].consumers()} == {operation.device}
        assert operation.device.endswith("CPU:0")


def _shape(tensor):
    return tuple(tensor.shape[1:])
