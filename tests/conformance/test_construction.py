"""A strategy that cannot be is refused by its constructor, in words."""

import pytest

from tests.conformance.strategies import library

MAKERS = {
    "mirrored": lambda devices: library().MirroredStrategy(devices),
    "central_storage": lambda devices: library().CentralStorageStrategy(devices),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_device_that_does_not_exist_is_named(make):
    with pytest.raises(ValueError, match="CPU:9"):
        make(["CPU:0", "CPU:9"])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_device_twice_is_named(make):
    with pytest.raises(ValueError, match="CPU:1"):
        make(["CPU:1", "CPU:1"])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_no_device_is_refused(make):
    with pytest.raises(ValueError, match="device"):
        make([])


def test_one_device_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="CPU:9"):
        library().OneDeviceStrategy("CPU:9")


def test_the_same_device_by_two_names_is_refused():
    with pytest.raises(ValueError, match="CPU:0"):
        library().MirroredStrategy(["CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"])
