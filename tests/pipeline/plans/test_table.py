import pytest

from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.schedules.gpipe import gpipe
from tfparallel.pipeline.plans.schedules.interleaved_one_f_one_b import interleaved_one_f_one_b
from tfparallel.pipeline.plans.schedules.zero_bubble import zero_bubble


def test_columns_are_time_slots():
    assert gpipe(2, 2).table().splitlines() == [
        "device 0  F0 F1 .  .  B1 B0",
        "device 1  .  F0 F1 B1 B0 .",
    ]


def test_columns_are_as_wide_as_the_longest_number():
    order = [(0, m, kind) for m in range(11) for kind in ("forward", "backward")]
    (line,) = Schedule("mine", [order]).table().splitlines()
    assert line.startswith("device 0  F0  B0  F1  B1 ")
    assert line.endswith("F9  B9  F10 B10")


def test_long_actions_go_on_as_dashes():
    assert zero_bubble(2, 1).table(forward_slots=2, backward_input_slots=3).splitlines() == [
        "device 0  F0 -  .  .  .  .  .  B0 -  -  W0",
        "device 1  .  .  F0 -  B0 -  -  W0 .  .  .",
    ]


def test_letters_tell_the_stages_of_a_device_apart():
    assert interleaved_one_f_one_b(2, 1).table().splitlines() == [
        "device 0  F0a .   F0b .   .   B0b .   B0a",
        "device 1  .   F0a .   F0b B0b .   B0a .",
    ]


def test_device_numbers_are_aligned():
    lines = gpipe(11, 1).table().splitlines()
    assert lines[0].startswith("device 0   F0")
    assert lines[10].startswith("device 10  . ")


@pytest.mark.parametrize("slots", [0, 1.5])
def test_rejects_slots_that_are_not_whole(slots):
    with pytest.raises(ValueError, match=f"Received: backward_slots={slots}"):
        gpipe(2, 2).table(backward_slots=slots)
