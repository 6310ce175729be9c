import pytest

from tests.pipeline.tables import rows
from tfparallel.pipeline.plans.schedules.one_f_one_b import one_f_one_b
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.plans.validation import validate

MICROBATCHES = (1, 2, 3, 4, 5, 8, 13)


def test_table_of_figure_4_of_megatron():
    # The figure draws a backward pass twice as wide as a forward pass and counts from 1.
    assert rows(one_f_one_b(4, 8).table(backward_slots=2)) == rows("""
        device 0  F0 F1 F2 F3 . . . . . . B0 - F4 B1 - F5 B2 - F6 B3 - F7 B4 - . B5 - . B6 - . B7 -
        device 1  . F0 F1 F2 . . . . B0 - F3 B1 - F4 B2 - F5 B3 - F6 B4 - F7 B5 - . B6 - . B7 - . .
        device 2  . . F0 F1 . . B0 - F2 B1 - F3 B2 - F4 B3 - F5 B4 - F6 B5 - F7 B6 - . B7 - . . . .
        device 3  . . . F0 B0 - F1 B1 - F2 B2 - F3 B3 - F4 B4 - F5 B5 - F6 B6 - F7 B7 - . . . . . .
    """)


def test_table_with_fewer_microbatches_than_stages():
    assert rows(one_f_one_b(3, 2).table()) == rows("""
        device 0  F0 F1 .  .  .  B0 .  B1
        device 1  .  F0 F1 .  B0 .  B1 .
        device 2  .  .  F0 B0 F1 B1 .  .
    """)


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_bubble_and_live_activations_are_the_closed_forms(num_stages):
    for num_microbatches in MICROBATCHES:
        schedule = one_f_one_b(num_stages, num_microbatches)
        validate(schedule)
        for forward_time, backward_time in [(1, 1), (1, 2), (3, 2)]:
            timeline = simulate(schedule, forward_time, backward_time)
            slots = num_microbatches + num_stages - 1
            assert timeline.makespan == slots * (forward_time + backward_time)
            assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / slots)
            assert timeline.peak_live_per_stage == tuple(
                min(num_microbatches, num_stages - stage) for stage in range(num_stages)
            )
