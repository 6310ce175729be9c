"""Devices as newcomers and stock TensorFlow write them."""

import pytest
import tensorflow as tf

import tfparallel
from tfparallel.replicas.device_names import device_names, short_names


@pytest.mark.parametrize(
    "devices",
    [2, [0, 1], ("CPU:0", "/device:CPU:1"), tf.config.list_logical_devices("CPU")[:2]],
    ids=["count", "numbers", "names", "objects"],
)
def test_devices_in_any_spelling(devices):
    assert short_names(device_names(devices, "devices")) == ["CPU:0", "CPU:1"]
    strategy = tfparallel.MirroredStrategy(devices)
    assert repr(strategy) == "MirroredStrategy(num_replicas=2, devices=['CPU:0', 'CPU:1'])"


def test_one_device():
    assert short_names(device_names("CPU:1", "device")) == ["CPU:1"]
    assert device_names(tf.config.LogicalDevice("/device:GPU:3", "GPU"), "device") == [
        "/device:GPU:3"
    ]


@pytest.mark.parametrize("devices", [0, -1])
def test_a_count_is_at_least_one(devices):
    with pytest.raises(
        ValueError, match=f"`devices` needs at least one device. Received: {devices}"
    ):
        tfparallel.MirroredStrategy(devices)


@pytest.mark.parametrize("devices", [True, 1.5, [None], {"CPU:0"}])
def test_anything_else_is_refused(devices):
    with pytest.raises(TypeError, match="takes names such as 'GPU:0', their numbers, or how many"):
        tfparallel.MirroredStrategy(devices)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="must name devices of this process. Received: 'CPU:4'"):
        tfparallel.MirroredStrategy(5)
