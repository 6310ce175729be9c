import pytest

from tests.pipeline.tables import rows
from tfparallel.pipeline.plans.schedules.zero_bubble import zero_bubble
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.plans.validation import validate

MICROBATCHES = (1, 2, 3, 4, 5, 8, 13)


def test_table_of_figure_3_of_zero_bubble():
    assert rows(zero_bubble(4, 8).table()) == rows("""
        device 0  F0 F1 F2 F3 . . . B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
        device 1  . F0 F1 F2 . . B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
        device 2  . . F0 F1 . B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
        device 3  . . . F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7
    """)


# The closed form needs W <= F and W <= B.
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 3, 2), (3, 3, 1)])
@pytest.mark.parametrize("num_stages", range(1, 7))
def test_makespan_is_the_closed_form(num_stages, times):
    for num_microbatches in MICROBATCHES:
        timeline = simulate(
            zero_bubble(num_stages, num_microbatches),
            forward_time=times[0],
            backward_input_time=times[1],
            backward_weight_time=times[2],
        )
        f, b, w = times
        if num_microbatches >= num_stages:
            idle = timeline.makespan - num_microbatches * (f + b + w)
            assert idle == (num_stages - 1) * (f + b - w)
        else:
            assert timeline.makespan == (num_microbatches + num_stages - 1) * (f + b) + w


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_every_stage_holds_as_many_activations_as_the_first_of_1f1b(num_stages):
    for num_microbatches in MICROBATCHES:
        schedule = zero_bubble(num_stages, num_microbatches)
        validate(schedule)
        live = simulate(schedule).peak_live_per_stage
        assert live == (min(num_microbatches, num_stages),) * num_stages
