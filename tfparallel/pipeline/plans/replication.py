"""Which layers go on which stage, and how many devices a stage has, chosen together.

A stage that is slower than the others may have several devices, which take microbatches in turn. It
then takes its time divided by their number:

    layers     a(1)  b(6)  c(1)                 on 4 devices
    one each   [a] [b] [c]           6          a device for each stage: b holds all up, one is idle
    together   [a] [b b] [c]         3          b on two devices
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tfparallel.pipeline.plans.counts import check_counts
from tfparallel.pipeline.plans.partition import run_totals


@dataclass(frozen=True)
class ReplicatedStage:
    """Layers of a stage, and its devices.

    Attributes:
        layers: their indices.
        num_devices: that take microbatches in turn.
    """

    layers: range
    num_devices: int


@dataclass(frozen=True)
class StageMemory:
    """What a device of a stage holds, for plans of as many stages as `live` has.

    Attributes:
        of_weights: bytes of each layer that a device holds once.
        of_outputs: bytes of each layer's outputs for one microbatch.
        live: of how many microbatches each stage holds them at once, all its devices together.
        limit: the most bytes of a device.
    """

    of_weights: Sequence[float]
    of_outputs: Sequence[float]
    live: Sequence[int]
    limit: float

    def fits(self, stage: int, num_devices: int) -> np.ndarray:
        """Whether layers start to stop - 1 fit on each of so many devices, at `[start, stop]`."""
        live = self.live[stage] / num_devices
        own = np.asarray(self.of_weights) + live * np.asarray(self.of_outputs)
        return run_totals(own) <= self.limit


def replicated_stages(
    costs: Sequence[float],
    num_devices: int,
    *,
    num_stages: int | None = None,
    boundary_costs: Sequence[float] | None = None,
    copy_costs: Sequence[float] | None = None,
    most_devices: int | None = None,
    allowed_devices: Collection[int] | None = None,
    memory: StageMemory | None = None,
) -> list[ReplicatedStage]:
    """The stages whose slowest is as fast as can be on `num_devices`.

    The result is exact. Of what is equally fast it has the fewest stages, then the fewest devices,
    which may be less than `num_devices`.

    Args:
        costs: time of each layer on one device, in topological order.
        num_devices: of all stages together.
        num_stages: how many stages. Default: whatever is best.
        boundary_costs: `boundary_costs[i]` is the time to send what is made up to layer i, paid by
            the stage before a cut, whose devices send for their microbatches. Default: none.
        copy_costs: of each layer, the time by microbatch to keep one more copy of its weights
            equal, which a stage pays for each device but one. Default: none.
        most_devices: of a stage. Default: no limit.
        allowed_devices: numbers of devices that a stage may have. Default: any.
        memory: what a device holds, and may; with `num_stages` only. Default: no limit.

    Raises:
        ValueError: if there are fewer devices or layers than stages, `boundary_costs` or
            `copy_costs` has the wrong length, or no stages are within the limit of `memory`.

    Source: the partitioner of PipeDream, Narayanan et al. 2019, https://arxiv.org/abs/1806.03377.
    """
    num_layers = len(costs)
    check_counts(num_devices=num_devices, num_layers=num_layers)
    _check_stages(num_stages, num_layers, num_devices)
    copies = [0.0] * num_layers if copy_costs is None else list(copy_costs)
    if len(copies) != num_layers:
        raise ValueError(
            f"copy_costs must have a number for each of {num_layers} layers. Received: "
            f"{len(copies)}."
        )
    sent = _sent(boundary_costs, num_layers)
    most = min(most_devices or num_devices, num_devices)
    allowed = [k for k in range(1, most + 1) if allowed_devices is None or k in allowed_devices]
    counts = [num_stages] if num_stages else range(1, min(num_layers, num_devices) + 1)
    times = {k: _times(costs, sent, copies, k) for k in allowed}
    plans = [_best(times, count, num_devices, memory) for count in counts]
    slowest = min(time for time, _ in plans)
    if math.isinf(slowest):
        raise ValueError(_nothing_fits(num_stages, num_devices, allowed, memory))
    return next(stages for time, stages in plans if time == slowest)


def time_of_slowest(
    stages: Sequence[ReplicatedStage],
    costs: Sequence[float],
    boundary_costs: Sequence[float] | None = None,
    copy_costs: Sequence[float] | None = None,
) -> float:
    """The time between two microbatches of a pipeline that is full."""
    sent = _sent(boundary_costs, len(costs))
    copies = copy_costs or [0.0] * len(costs)
    return max(
        _times(costs, sent, copies, each.num_devices)[each.layers.start, each.layers.stop]
        for each in stages
    )


def _sent(boundary_costs: Sequence[float] | None, num_layers: int) -> list[float]:
    """What each layer's stage sends if it is the last one there."""
    sent = [0.0] * (num_layers - 1) if boundary_costs is None else list(boundary_costs)
    if len(sent) != num_layers - 1:
        raise ValueError(
            f"boundary_costs must have a number between each two of {num_layers} layers. Received: "
            f"{len(sent)}."
        )
    return [*sent, 0.0]


def _times(costs: Sequence, sent: Sequence, copies: Sequence, num_devices: int) -> np.ndarray:
    """Time of layers start to stop - 1 on so many devices, at `[start, stop]`."""
    own = run_totals(np.asarray(costs, np.float64))
    own[:, 1:] += np.asarray(sent)
    return own / num_devices + (num_devices - 1) * _finite(run_totals(np.asarray(copies)))


def _finite(totals: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(totals), 0.0, totals)


def _best(
    times: dict[int, np.ndarray], num_stages: int, num_devices: int, memory: StageMemory | None
) -> tuple[float, list[ReplicatedStage]]:
    """The least time of `num_stages` on at most `num_devices`, by dynamic programming.

    `best[stop, used]` is that of the layers before `stop` on `used` devices, with the last stage.
    """
    num_layers = len(next(iter(times.values()))) - 1
    best = np.full((num_layers + 1, num_devices + 1), math.inf)
    best[0, 0] = 0.0
    chosen = []  # by stage: where it starts and its devices, at `[stop, used]`
    for stage in range(num_stages):
        longer = np.full_like(best, math.inf)
        starts, counts = np.zeros(best.shape, int), np.zeros(best.shape, int)
        for own, of_count in times.items():
            allowed = of_count
            if memory is not None:
                allowed = np.where(memory.fits(stage, own), of_count, math.inf)
            before = best[:, None, : num_devices + 1 - own]
            slowest = np.maximum(before, allowed[:, :, None])  # [start, stop, used before]
            time, start = slowest.min(0), slowest.argmin(0)
            is_better = time < longer[:, own:]
            longer[:, own:] = np.where(is_better, time, longer[:, own:])
            starts[:, own:] = np.where(is_better, start, starts[:, own:])
            counts[:, own:] = np.where(is_better, own, counts[:, own:])
        best = longer
        chosen.append((starts, counts))
    used = int(best[num_layers].argmin())  # the fewest of those that are equally fast
    time = float(best[num_layers, used])
    return time, [] if math.isinf(time) else _traced(chosen, num_layers, used)


def _traced(chosen: Sequence, stop: int, used: int) -> list[ReplicatedStage]:
    """The stages that lead to `[stop, used]` of the last one."""
    stages = []
    for starts, counts in reversed(chosen):
        start, own = int(starts[stop, used]), int(counts[stop, used])
        stages.append(ReplicatedStage(range(start, stop), own))
        stop, used = start, used - own
    return stages[::-1]


def _nothing_fits(
    num_stages: int | None, num_devices: int, allowed: Sequence, memory: StageMemory | None
) -> str:
    received = f"{num_stages} stages on {num_devices} devices, of {list(allowed)} for a stage"
    if memory is None:
        return f"A stage must have one of the allowed numbers of devices. Received: {received}."
    return (
        f"Every device must hold what its stage does. Received: {received}, and a limit of "
        f"{memory.limit:.0f} bytes for each. Raise the limit, or take more stages or devices."
    )


def _check_stages(num_stages: int | None, num_layers: int, num_devices: int) -> None:
    if num_stages is None:
        return
    check_counts(num_stages=num_stages)
    if num_stages > min(num_layers, num_devices):
        raise ValueError(
            f"Every stage must have a layer and a device. Received: num_stages={num_stages} for "
            f"{num_layers} layers and {num_devices} devices. Use fewer stages: "
            f"{min(num_layers, num_devices)} would fit."
        )
