"""Which layers go on which stage, and how many devices a stage has, chosen together.

A stage that is slower than the others may have several devices, which divide the rows of every
microbatch. It then takes its time divided by their number:

    layers     a(1)  b(6)  c(1)                 on 4 devices
    one each   [a] [b] [c]           6          a device for each stage: b holds all up, one is idle
    together   [a] [b b] [c]         3          b on two devices
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfparallel.pipeline.plans.counts import check_counts


@dataclass(frozen=True)
class ReplicatedStage:
    """Layers of a stage, and its devices.

    Attributes:
        layers: their indices.
        num_devices: that divide the rows of a microbatch.
    """

    layers: range
    num_devices: int


def replicated_stages(
    costs: Sequence[float],
    num_devices: int,
    *,
    num_stages: int | None = None,
    boundary_costs: Sequence[float] | None = None,
    most_devices: int | None = None,
) -> list[ReplicatedStage]:
    """The stages whose slowest is as fast as can be on `num_devices`.

    The result is exact. Of what is equally fast it has the fewest stages, then the fewest devices,
    which may be less than `num_devices`.

    Args:
        costs: time of each layer on one device, in topological order.
        num_devices: of all stages together.
        num_stages: how many stages. Default: whatever is best.
        boundary_costs: `boundary_costs[i]` is the time to send what is made up to layer i, paid by
            the stage before a cut, whose devices send their rows. Default: none.
        most_devices: of a stage. Default: no limit.

    Raises:
        ValueError: if there are fewer devices or layers than stages, or `boundary_costs` has the
            wrong length.

    Source: the partitioner of PipeDream, Narayanan et al. 2019, https://arxiv.org/abs/1806.03377.
    """
    num_layers = len(costs)
    check_counts(num_devices=num_devices, num_layers=num_layers)
    _check_stages(num_stages, num_layers, num_devices)
    sent = [0.0] * (num_layers - 1) if boundary_costs is None else list(boundary_costs)
    if len(sent) != num_layers - 1:
        raise ValueError(
            f"boundary_costs must have a number between each two of {num_layers} layers. Received: "
            f"{len(sent)}."
        )
    most = min(most_devices or num_devices, num_devices)
    counts = [num_stages] if num_stages else range(1, min(num_layers, num_devices) + 1)
    plans = [_best(costs, [*sent, 0.0], count, num_devices, most) for count in counts]
    slowest = min(time for time, _ in plans)
    return next(stages for time, stages in plans if time == slowest)


def time_of_slowest(
    stages: Sequence[ReplicatedStage],
    costs: Sequence[float],
    boundary_costs: Sequence[float] | None = None,
) -> float:
    """The time between two microbatches of a pipeline that is full."""
    sent = [*(boundary_costs or [0.0] * (len(costs) - 1)), 0.0]
    return max(_time(costs, sent, each.layers, each.num_devices) for each in stages)


def _time(costs: Sequence, sent: Sequence, layers: range, num_devices: int) -> float:
    return (sum(costs[i] for i in layers) + sent[layers.stop - 1]) / num_devices


def _best(
    costs: Sequence, sent: Sequence, num_stages: int, num_devices: int, most: int
) -> tuple[float, list[ReplicatedStage]]:
    """The least time of `num_stages` on at most `num_devices`, by dynamic programming.

    `best[stop, used]` is that of the layers before `stop` on `used` devices, with the last stage.
    """
    best: dict[tuple[int, int], tuple[float, list[ReplicatedStage]]] = {(0, 0): (0.0, [])}
    for stage in range(num_stages):
        later = num_stages - stage - 1
        longer: dict[tuple[int, int], tuple[float, list[ReplicatedStage]]] = {}
        for (start, used), (time, stages) in best.items():
            for stop in range(start + 1, len(costs) - later + 1):
                for own in range(1, min(most, num_devices - used - later) + 1):
                    slowest = max(time, _time(costs, sent, range(start, stop), own))
                    known = longer.get((stop, used + own), (math.inf, []))
                    if slowest < known[0]:
                        new = ReplicatedStage(range(start, stop), own)
                        longer[stop, used + own] = (slowest, [*stages, new])
        best = longer
    whole = [(*best[key], key[1]) for key in best if key[0] == len(costs)]
    time, stages, _ = min(whole, key=lambda each: (each[0], each[2]), default=(math.inf, [], 0))
    return time, stages


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
