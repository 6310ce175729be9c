import pytest

from tests.pipeline.tables import rows
from tfparallel.pipeline.plans.schedules.gpipe import gpipe
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.plans.validation import validate

MICROBATCHES = (1, 2, 3, 4, 5, 8, 13)


def test_table_of_figure_2_of_gpipe():
    assert rows(gpipe(4, 4).table()) == rows("""
        device 0  F0 F1 F2 F3 .  .  .  .  .  .  B3 B2 B1 B0
        device 1  .  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0 .
        device 2  .  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .  .
        device 3  .  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .  .
    """)


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_bubble_and_live_activations_are_the_closed_forms(num_stages):
    for num_microbatches in MICROBATCHES:
        schedule = gpipe(num_stages, num_microbatches)
        validate(schedule)
        timeline = simulate(schedule, forward_time=1, backward_time=2)
        slots = num_microbatches + num_stages - 1
        assert timeline.makespan == slots * 3
        assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / slots)
        assert timeline.peak_live_per_stage == (num_microbatches,) * num_stages


@pytest.mark.parametrize(("num_microbatches", "percent"), [(4, 57), (8, 73)])
def test_utilisation_of_four_stages(num_microbatches, percent):
    for utilisation in simulate(gpipe(4, num_microbatches)).utilisation:
        assert round(100 * utilisation) == percent


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "4", None])
def test_rejects_a_count_that_is_not_a_positive_whole_number(count):
    with pytest.raises(ValueError, match=f"whole number .* Received: num_stages={count!r}"):
        gpipe(count, 4)
    with pytest.raises(ValueError, match=f"Received: num_microbatches={count!r}"):
        gpipe(4, count)
