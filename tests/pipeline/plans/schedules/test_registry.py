import pytest

from tfparallel.pipeline.plans.schedules.registry import SCHEDULES, build_schedule
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.plans.validation import validate


def test_names_are_those_of_the_schedules():
    assert [*SCHEDULES] == ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
    for name in SCHEDULES:
        assert build_schedule(name, 2, 4).name == name


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_valid_and_no_slower_than_gpipe(name):
    for num_devices in range(1, 9):
        for num_microbatches in range(1, 18):
            schedule = build_schedule(name, num_devices, num_microbatches)
            validate(schedule)
            assert schedule.num_devices == num_devices
            assert schedule.num_microbatches == num_microbatches
            scale = num_devices / schedule.num_stages  # a chunk is that part of a stage
            makespan = simulate(schedule, scale, 2 * scale).makespan
            assert makespan <= (num_microbatches + num_devices - 1) * 3 + 1e-9


def test_chunks_are_for_the_interleaved_schedule_only():
    assert build_schedule("interleaved_1f1b", 2, 4, chunks_per_device=3).num_stages == 6
    assert build_schedule("1f1b", 2, 4, chunks_per_device=1).num_stages == 2
    with pytest.raises(ValueError, match=r"'1f1b' has one stage .* Received: chunks_per_device=2"):
        build_schedule("1f1b", 2, 4, chunks_per_device=2)


def test_an_unknown_name_is_refused_with_a_hint():
    with pytest.raises(ValueError, match="one of 'gpipe', .*Received: '1F1b'. .*mean '1f1b'"):
        build_schedule("1F1b", 2, 4)


def test_by_default_every_stage_has_four_microbatches():
    assert build_schedule("1f1b", 3).num_microbatches == 12
    assert build_schedule("interleaved_1f1b", 2).num_microbatches == 16  # of 2 devices, 4 stages
    assert build_schedule("interleaved_1f1b", 2, chunks_per_device=3).num_microbatches == 24
