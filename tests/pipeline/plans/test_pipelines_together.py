"""The orders of all devices of several pipelines."""

import pytest

from tfparallel.pipeline.plan_of_shares import plan_of_shares
from tfparallel.pipeline.plans.pipelines_together import pipelines_together
from tfparallel.pipeline.plans.schedules.registry import SCHEDULES
from tfparallel.pipeline.plans.simulation import simulate
from tfparallel.pipeline.stages import Stages

SHARED = [["A", "B", "D"], ["A", "C", "D"]]


def three_stages(name, microbatches=3):
    return SCHEDULES[name](3, microbatches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_each_device_runs_its_stage_for_the_microbatches_of_its_pipelines(name):
    together = pipelines_together(three_stages(name), SHARED)
    assert together.devices == ("A", "B", "C", "D")
    stages_and_microbatches = [{(a.stage, a.microbatch) for a in own} for own in together.orders]
    first, second = range(3), range(3, 6)
    assert stages_and_microbatches == [
        {(0, m) for m in (*first, *second)},
        {(1, m) for m in first},
        {(1, m) for m in second},
        {(2, m) for m in (*first, *second)},
    ]
    assert len(list(together.steps())) == len(together.actions)  # nothing waits in a circle


def test_pipelines_without_a_device_in_common_are_one_behind_the_other():
    together = pipelines_together(three_stages("1f1b"), [["A", "B", "C"], ["D", "E", "F"]])
    assert together.devices == ("A", "B", "C", "D", "E", "F")
    alone = simulate(three_stages("1f1b"))
    both = simulate(together)
    assert both.makespan == alone.makespan
    assert both.utilisation == alone.utilisation * 2


def test_a_stage_on_two_devices_takes_half_the_time():
    """On paper a full pipeline goes at the pace of its slowest stage: 2, and 1 with two devices."""
    times = [1.0, 2.0, 1.0], [2.0, 4.0, 2.0]
    one = simulate(three_stages("1f1b", 32), *times).makespan
    two = simulate(pipelines_together(three_stages("1f1b", 16), SHARED), *times).makespan
    assert one == 32 * 6 + 4
    assert 32 * 3 < two < 32 * 3 + 16


def test_a_stage_twice_as_slow_on_two_devices_holds_nothing_up():
    """`Measure` tells the shares: with one device the others wait for it, with two nobody does."""
    stages = Stages([], [0, 1, 2], time_shares=[0.25, 0.5, 0.25])
    one = plan_of_shares(three_stages("1f1b", 32), stages, ["A", "B", "D"])
    both = pipelines_together(three_stages("1f1b", 16), SHARED)
    two = plan_of_shares(both, stages, list(both.devices), [1, 2, 1])
    assert one.imbalance > 0.25
    assert abs(two.imbalance) < 0.02
    assert "stage 1, which takes 50%" in one.slowest
    assert set(two.utilisation) == {"A", "B", "C", "D"}
    assert min(two.utilisation.values()) > 0.8
