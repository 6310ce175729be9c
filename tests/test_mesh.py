"""A grid of devices with named axes, as plain Python."""

import pytest

from tfparallel.mesh import mesh_of

EIGHT = list("abcdefgh")


def test_devices_are_where_the_axes_say_whatever_their_order():
    mesh = mesh_of([2, 2, 2], ["data", "pipeline", "model"], EIGHT)
    assert mesh.devices[1, 0, 0, 1] == "f"
    turned = mesh_of([2, 2, 2], ["model", "pipeline", "batch"], EIGHT)
    assert turned.devices[1, 0, 0, 1] == "f"  # data 1, pipeline 0, model 1
    assert turned.devices[1, 0, 1, 0] == "d"
    assert str(mesh) == "data 2 x pipeline 2 x model 2"


def test_an_axis_that_is_not_there_has_size_1():
    mesh = mesh_of([4], ["pipeline"], EIGHT[:4])
    assert [mesh.size(axis) for axis in ("data", "shard", "pipeline", "model")] == [1, 1, 4, 1]
    assert "data" not in mesh.names


@pytest.mark.parametrize(
    ("sizes", "names", "devices", "message"),
    [
        ([2, 3], ["data", "pipeline"], EIGHT, "data 2 x pipeline 3 = 6 for 8 devices"),
        ([2, 3], ["data", "pipeline"], EIGHT, "would fit: data 2 x pipeline 4 = 8"),
        ([3, 3], ["data", "model"], EIGHT, "No other size of one axis fits"),
        ([8], ["pipline"], EIGHT, "'pipline'. Did you mean 'pipeline'"),
        ([2, 4], ["data", "batch"], EIGHT, "all of them 'data'"),
        ([0, 8], ["data", "model"], EIGHT, "sizes of 1 or more"),
    ],
)
def test_what_does_not_fit_is_told(sizes, names, devices, message):
    with pytest.raises(ValueError, match=message):
        mesh_of(sizes, names, devices)


@pytest.mark.parametrize(
    ("sizes", "devices_each", "says"),
    [
        ({"data": 4, "model": 2}, 8, ["'data' (4) stays inside", "'model' (2) stays inside"]),
        ({"data": 4, "model": 2}, 4, ["'data' (4) crosses 2 proc", "'model' (2) stays inside"]),
        ({"batch": 2, "fsdp": 4}, 2, ["'batch' (2) crosses 2 proc", "'fsdp' (4) crosses 2 proc"]),
        ({"shard": 8, "model": 1}, 1, ["'shard' (8) crosses 8 proc"]),
        ({"model": 4, "data": 2}, 2, ["'data' (2) stays inside", "'model' (4) crosses 4 proc"]),
    ],
    ids=str,
)
def test_says_which_axis_leaves_a_process(sizes, devices_each, says):
    mesh = mesh_of(list(sizes.values()), list(sizes), [str(i) for i in range(8)])
    text = mesh.over_processes(mesh.devices.astype(int) // devices_each)
    lines = text.split("Axis ")[1:]
    assert all(line.startswith(own) for line, own in zip(lines, says, strict=True))
