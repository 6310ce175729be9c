import random

import pytest

from tfparallel.parameter_server.staleness import StalenessBound


def test_bound_of_zero_runs_one_step_at_a_time():
    staleness = StalenessBound(0)
    assert staleness.may_start()
    staleness.start(0)
    assert not staleness.may_start()
    assert staleness.may_apply(0)
    assert staleness.apply(0) == 0
    assert staleness.may_start()


def test_a_fast_worker_waits_for_a_slow_one():
    staleness = StalenessBound(2)
    staleness.start(0)  # slow
    for step in (1, 2):
        staleness.start(step)
        assert staleness.may_apply(step)
        staleness.apply(step)
    staleness.start(3)
    assert not staleness.may_apply(3)  # the slow one would then be 3 behind
    assert staleness.apply(0) == 2
    assert staleness.may_apply(3)


def test_without_a_bound_nobody_waits():
    staleness = StalenessBound(None)
    staleness.start(0)
    for step in range(1, 50):
        assert staleness.may_start()
        staleness.start(step)
        assert staleness.may_apply(step)
        staleness.apply(step)
    assert staleness.apply(0) == 49
    assert staleness.largest == 49


@pytest.mark.parametrize("bound", range(5))
@pytest.mark.parametrize("num_workers", (1, 2, 4))
def test_bound_holds_and_nobody_waits_in_a_circle(bound, num_workers):
    """Random orders of starting and finishing: always someone may go on, none is too stale."""
    rng = random.Random(10 * bound + num_workers)
    staleness, under_way, number = StalenessBound(bound), [], 0
    for _ in range(3000):
        can_start = len(under_way) < num_workers and staleness.may_start()
        can_apply = [step for step in under_way if staleness.may_apply(step)]
        assert can_start or can_apply
        if can_start and (not can_apply or rng.random() < 0.5):
            staleness.start(number)
            under_way.append(number)
            number += 1
        else:
            step = rng.choice(can_apply)
            under_way.remove(step)
            assert staleness.apply(step) <= bound
    assert staleness.largest == min(bound, staleness.largest)


def test_a_lost_step_binds_nobody():
    staleness = StalenessBound(0)
    staleness.start(0)
    staleness.forget(0)
    assert staleness.may_start()
