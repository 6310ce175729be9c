"""What a schedule leaves idle, with stages as their parts were measured, told as shares of a step.

Derived, not measured: a step has no clock in it. `strategy.profile` measures one step.
"""

from collections.abc import Sequence

from tfparallel.measure.shares import NO_PLAN, Plan
from tfparallel.pipeline.plans.orders import Orders
from tfparallel.pipeline.plans.simulation import Timeline, simulate
from tfparallel.pipeline.stages import Stages


def plan_of_shares(
    schedule: Orders, stages: Stages, devices: Sequence[str], counts: Sequence[int] | None = None
) -> Plan:
    """Bubble and imbalance of a step.

    Args:
        schedule: which is carried out.
        stages: of the model; where their parts were not measured, all count as equal.
        devices: the name of each device of the schedule.
        counts: of each stage, how many devices take its microbatches in turn. Default: one each.
    """
    counts = counts or [1] * schedule.num_stages
    times = stage_times(stages, schedule.num_stages)
    even, real = _with_stage_times(schedule, counts), _with_stage_times(schedule, times)
    if not real.makespan:
        return NO_PLAN
    bubble = min(even.bubble_fraction, real.bubble_fraction)
    slowest = max(range(len(times)), key=lambda stage: times[stage] / counts[stage])
    return Plan(
        bubble,
        real.bubble_fraction - bubble,
        f"stage {slowest}, which takes {times[slowest] / sum(times):.0%} of the layers' time",
        dict(zip(devices, real.utilisation, strict=True)),
    )


def stage_times(stages: Stages, num_stages: int) -> list[float]:
    """The share of the model's time that each stage takes."""
    if stages.time_shares is None:
        return [1 / num_stages] * num_stages
    times = [0.0] * num_stages
    for stage, share in zip(stages.stage_of, stages.time_shares, strict=True):
        times[stage] += share
    return times


def _with_stage_times(schedule: Orders, times: Sequence[float]) -> Timeline:
    return simulate(schedule, list(times), [2 * each for each in times])
