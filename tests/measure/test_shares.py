"""Shares sum to the wall time whatever was measured, and each loss lands in its own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel.measure.shares import CATEGORIES, Plan, Spent, seconds_by_category

times = st.floats(0, 100)


@settings(max_examples=200)
@given(
    own=st.lists(times, min_size=9, max_size=9),
    bubble=st.floats(0, 0.5),
    imbalance=st.floats(0, 0.5),
    behind_s=times,
)
def test_they_sum_to_the_wall_time(own, bubble, imbalance, behind_s):
    """Also where parts overlap, so that they are longer together than what they are parts of."""
    steps, waiting, iterators, python, tracing, linked, waited, saving, other = own
    spent = Spent(
        wall_s=steps + iterators + saving + other + 1.0,
        steps_s=steps,
        input_s=waiting,
        iterators_s=iterators,
        python_s=python,
        tracing_s=tracing,
        linked_s=linked,
        waited_s=min(waited, linked),
        outside_s={"Saver": saving},
        validation_s=other,
    )
    seconds = seconds_by_category(spent, frozenset({"Saver"}), Plan(bubble, imbalance), behind_s)
    assert tuple(seconds) == CATEGORIES
    assert all(each >= -1e-9 for each in seconds.values())
    assert sum(seconds.values()) == pytest.approx(spent.wall_s, rel=5e-3)


ONLY = {
    "input": (Spent(steps_s=8, input_s=4), 4),
    "communication": (Spent(steps_s=8, linked_s=3, waited_s=1), 2),
    "imbalance": (Spent(steps_s=8, linked_s=3, waited_s=1), 1),
    "host": (Spent(steps_s=8, python_s=3), 3 + 2),
    "tracing": (Spent(steps_s=8, tracing_s=3), 3),
    "saving": (Spent(steps_s=8, callbacks_s={"Saver": 5}), 5),
    "validation": (Spent(steps_s=8, validation_s=1.5), 1.5),
    "compute": (Spent(steps_s=8, callbacks_s={"Sleeper": 5}), 3),
}


@pytest.mark.parametrize("category", ONLY)
def test_each_lands_in_its_own(category, monkeypatch):
    spent, expected = ONLY[category]
    spent.wall_s = 10.0
    seconds = seconds_by_category(spent, frozenset({"Saver"}))
    assert seconds[category] == pytest.approx(expected)


def test_a_schedule_divides_what_a_graph_takes():
    spent = Spent(wall_s=10, steps_s=10, input_s=2)
    seconds = seconds_by_category(spent, frozenset(), Plan(bubble=0.25, imbalance=0.125))
    assert (seconds["bubble"], seconds["imbalance"], seconds["compute"]) == (2.0, 1.0, 5.0)


def test_a_rank_in_between_does_not_hide_the_slowest():
    """Rank 2 meets rank 1 at once, then waits in its receives for rank 0, through rank 1."""
    spent = Spent(wall_s=10, steps_s=10, linked_s=4, waited_s=0.5)
    seconds = seconds_by_category(spent, frozenset(), behind_s=3.0)
    assert (seconds["imbalance"], seconds["communication"]) == (3.0, 1.0)
