"""Operations that `tfparallel selftest` finds on the host; CPU:1 and CPU:2 stand in for GPUs."""

import itertools

import keras
import pytest
import tensorflow as tf

from tfparallel.internals.ran_operations import Node
from tfparallel.selftest import placement_checks, trials
from tfparallel.selftest.placement_checks import (
    judge_placement,
    misplaced,
    operations_on_host,
)
from tfparallel.selftest.trials import Trial
from tfparallel.selftest.verdicts import CheckFailedError

DEVICES = ["CPU:1", "CPU:2"]


def _steps() -> list:
    asked = itertools.product(placement_checks._STRATEGIES, ("mlp", "gpt"))
    few = {("mirrored", "mlp"), ("pipeline_1f1b", "mlp")}
    return [pytest.param(*key, marks=() if key in few else pytest.mark.long) for key in asked]


@pytest.mark.parametrize(("strategy", "model"), _steps())
@pytest.mark.timeout(300)
def test_a_step_is_on_its_devices(strategy, model):
    assert operations_on_host(strategy, Trial(model, "uneven"), DEVICES) == []


class OnHost(keras.layers.Layer):
    """A layer that computes on the host, whatever device it is asked for on."""

    def call(self, x):
        with tf.device("CPU:0"):
            return tf.tan(x)


def test_a_layer_on_the_host_is_found(monkeypatch):
    mlp = lambda: keras.Sequential([keras.Input((8,)), OnHost(), keras.layers.Dense(3)])  # noqa: E731
    monkeypatch.setitem(trials.MODELS, "mlp", mlp)
    found = operations_on_host("mirrored", Trial("mlp", "uneven"), DEVICES)
    assert found and {each.partition(" ")[0] for each in found} >= {"Tan"}
    with pytest.raises(CheckFailedError, match="mirrored, mlp: .*on_host"):
        judge_placement({"mirrored, mlp": found})
    assert judge_placement({"mirrored, mlp": []}).text.startswith("1 steps")


def test_a_step_on_no_device_is_found():
    with pytest.raises(CheckFailedError, match="no step of one_device on CPU:0"):
        operations_on_host("one_device", Trial("mlp", "uneven"), ["CPU:0"])


@pytest.mark.parametrize(
    ("name", "operation", "device", "is_wrong"),
    [
        ("step/mul_3", "Mul", "CPU:0", False),
        ("step/sgd/update_0/mul_3", "Mul", "CPU:0", True),
        ("step/gradient_tape/dense_1/mul", "Mul", "CPU:0", True),
        ("step/dense_1/mul", "Mul", "GPU:0", False),
        ("MatMul", "MatMul", "CPU:0", True),
        ("step/sgd/update_0/Cast/Read", "ReadVariableOp", "CPU:0", False),
        ("Timestamp_3", "Timestamp", "CPU:0", False),
        ("ParallelMapDatasetV2", "ParallelMapDatasetV2", "CPU:0", False),
    ],
)
def test_what_the_host_may_do(name, operation, device, is_wrong):
    nodes = {name: Node(operation, f"/job:localhost/replica:0/task:0/device:{device}", ())}
    assert bool(list(misplaced(nodes, {"sgd", "gradient_tape", "dense"}))) is is_wrong
