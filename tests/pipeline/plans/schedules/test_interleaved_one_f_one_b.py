import math

import pytest

from tests.pipeline.tables import rows
from tfparallel.pipeline.plans.schedules.interleaved_one_f_one_b import interleaved_one_f_one_b
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.plans.validation import validate

GRID = [(num_microbatches, chunks) for num_microbatches in range(1, 14) for chunks in (2, 3)]


def test_table_of_figure_4_of_megatron():
    # The figure counts from 1, draws the second chunk (b) lighter, and a backward pass twice as
    # wide. Its first device: 1 2 3 4, 1 2 3 4, 5 6 7, then backward and forward in turns
    # 1 8 2 5 3 6 4 7 1 8 2, then backward 3 4, 5 6 7 8, 5 6 7 8.
    assert rows(interleaved_one_f_one_b(4, 8, 2).table()) == rows("""
        device 0  F0a F1a F2a F3a F0b F1b F2b F3b F4a F5a F6a
            B0b F7a B1b . . F4b B2b F5b B3b F6b B0a F7b B1a
            B2a B3a . B4b . B5b . B6b . B7b B4a B5a B6a B7a
        device 1  . F0a F1a F2a F3a F0b F1b F2b F3b F4a
            B0b F5a B1b F6a B2b F7a B3b F4b B0a F5b B1a F6b B2a F7b B3a
            . B4b . B5b . B6b . B7b B4a B5a B6a B7a .
        device 2  . . F0a F1a F2a F3a F0b F1b F2b
            B0b F3b B1b F4a B2b F5a B3b F6a B0a F7a B1a F4b B2a F5b B3a F6b B4b F7b B5b
            . B6b . B7b B4a B5a B6a B7a . .
        device 3  . . . F0a F1a F2a F3a F0b
            B0b F1b B1b F2b B2b F3b B3b F4a B0a F5a B1a F6a B2a F7a B3a F4b B4b F5b B5b F6b B6b
            F7b B7b B4a B5a B6a B7a . . .
    """)


def test_groups_share_the_microbatches_that_are_left_over():
    # Five microbatches on two devices: groups of 3 and 2.
    assert rows(interleaved_one_f_one_b(2, 5, 2).table()) == rows("""
        device 0  F0a F1a F2a F0b F1b F2b
            B0b F3a B1b F4a B2b F3b B0a F4b B1a . B2a . B3b B4b B3a B4a
        device 1  . F0a F1a F2a F0b
            B0b F1b B1b F2b B2b F3a B0a F4a B1a F3b B2a F4b B3b B4b B3a B4a .
    """)


def test_a_stage_lives_on_the_device_of_its_number_modulo_the_devices():
    schedule = interleaved_one_f_one_b(3, 6, 2)
    assert schedule.device_of == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}


@pytest.mark.parametrize("times", [(1, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("num_devices", range(1, 6))
def test_makespan_is_the_closed_form(num_devices, times):
    for num_microbatches, chunks in GRID:
        timeline = simulate(interleaved_one_f_one_b(num_devices, num_microbatches, chunks), *times)
        if num_microbatches >= num_devices:
            slots = chunks * num_microbatches + num_devices - 1
            assert timeline.bubble_fraction == pytest.approx((num_devices - 1) / slots)
        else:
            slots = chunks * num_devices + num_microbatches - 1
        assert timeline.makespan == slots * sum(times)


@pytest.mark.parametrize("num_devices", range(1, 6))
def test_live_activations_are_within_the_bound(num_devices):
    for num_microbatches, chunks in GRID:
        schedule = interleaved_one_f_one_b(num_devices, num_microbatches, chunks)
        validate(schedule)
        group = math.ceil(num_microbatches / max(1, num_microbatches // num_devices))
        assert simulate(schedule).peak_live_per_device == tuple(
            min(chunks * num_microbatches, (chunks - 1) * group + 2 * (num_devices - device) - 1)
            for device in range(num_devices)
        )


def test_rejects_a_single_chunk():
    with pytest.raises(ValueError, match="at least 2 chunks .* use the schedule '1f1b'"):
        interleaved_one_f_one_b(4, 8, 1)
