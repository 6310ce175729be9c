"""Devices as newcomers and stock TensorFlow write them."""

import pytest
import tensorflow as tf

import tfparallel
from tfparallel.internals import CollectiveAllReduce
from tfparallel.replicas.device_names import device_names, is_in_parts, short_names


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
    with pytest.raises(TypeError, match=r"expected str \| int \| LogicalDevice \| Sequence\["):
        tfparallel.MirroredStrategy(devices)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="must name devices of this process. Received: 'CPU:4'"):
        tfparallel.MirroredStrategy(5)


GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(4)]


@pytest.mark.parametrize(
    ("visible", "num_parts", "cuda_visible_devices", "expected"),
    [
        (GPUS, {}, None, False),
        (GPUS, {0: 1}, "0,1,2,3", False),
        (GPUS[:1], {0: 3}, None, True),  # more GPUs than parts: counts of all do not tell
        (GPUS, {2: 2}, None, True),
        (GPUS[:1], {2: 2}, None, False),  # one that is not visible
        (GPUS[:2], {}, "MIG-aaa, MIG-bbb", True),
        (GPUS[:1], {}, "MIG-aaa", False),  # one part is all that the process has
        (GPUS[:2], {}, "GPU-aaa,GPU-bbb", False),
        ([], {}, "", False),
    ],
)
def test_parts_of_one_gpu_are_told_from_gpus(
    monkeypatch, visible, num_parts, cuda_visible_devices, expected
):
    parts = {GPUS[i]: [tf.config.LogicalDeviceConfiguration(64)] * n for i, n in num_parts.items()}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", parts.get)
    set_ = {} if cuda_visible_devices is None else {"CUDA_VISIBLE_DEVICES": cuda_visible_devices}
    assert is_in_parts(set_) is expected


@pytest.mark.parametrize("are_parts", [False, True])
def test_nccl_reduces_between_gpus_but_not_between_parts_of_one(monkeypatch, are_parts):
    extended = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).extended
    assert not isinstance(extended._local_reduction(), CollectiveAllReduce)
    monkeypatch.setattr(extended, "_devices", ("/device:GPU:0", "/device:GPU:1"))
    monkeypatch.setattr("tfparallel.replicas.local.is_in_parts", lambda: are_parts)
    assert (extended._local_reduction() is extended._collective_ops) is not are_parts
