"""Stages with several devices, which take microbatches in turn.

    stages        0        1        2          a microbatch takes
    devices       A       B, C      D
    pipeline 0    A        B        D          microbatches 0 .. M/2-1
    pipeline 1    A        C        D          microbatches M/2 .. M-1

So they are pipelines that have some devices in common, and there one copy of each weight. The first
pipeline updates weights, and tells the other devices; slots of optimizers exist once. A microbatch
is on one device of a stage: BatchNorm and losses see what they see with one device for each stage.
A stage on k devices takes k microbatches in the time of one.

Source: 1F1B-RR of PipeDream, Narayanan et al. 2019, https://arxiv.org/abs/1806.03377
"""

import math
from collections.abc import Sequence
from typing import Any

Stage = str | Sequence[str]  # the device of a stage, or its devices


def has_groups(devices: Any) -> bool:
    """Whether some stage has a list of devices."""
    return devices is not None and any(isinstance(stage, (list, tuple)) for stage in devices)


def flat(devices: Any) -> Any:
    """All devices, stage by stage; as they are where each stage has one."""
    if not has_groups(devices):
        return devices
    return [name for stage in devices for name in _group(stage)]


def pipelines_of(devices: Sequence[Stage]) -> list[list[str]]:
    """For each pipeline the device of each stage; as many as let each stage share evenly.

    Raises:
        ValueError: for a stage without a device.
    """
    groups = [_group(stage) for stage in devices]
    if not all(groups):
        raise ValueError(f"Every stage must have a device. Received: devices={list(devices)!r}.")
    count = math.lcm(*map(len, groups))
    return [[group[i % len(group)] for group in groups] for i in range(count)]


def microbatches_of_each(
    num_microbatches: int | None, devices: Sequence[Stage], count: int
) -> int | None:
    """How many microbatches each of `count` pipelines has; None where there is one by default.

    Raises:
        ValueError: where the microbatches of a batch are not divided evenly.
    """
    if count == 1:
        return num_microbatches
    if num_microbatches is None:
        return math.ceil(4 * len(devices) / count)
    if num_microbatches % count:
        below = num_microbatches // count * count
        would = [n for n in (below, below + count) if n > 0]
        raise ValueError(
            "Devices of a stage take microbatches in turn, so that their numbers "
            f"{[len(_group(stage)) for stage in devices]} divide num_microbatches evenly. "
            f"Received: num_microbatches={num_microbatches}. What would fit: "
            f"{', '.join(map(str, would))}."
        )
    return num_microbatches // count


def first_with_copy(places: Sequence[str]) -> tuple[int, ...]:
    """For each pipeline the first one that has the same device in this place."""
    return tuple(list(places).index(place) for place in places)


def _group(stage: Stage) -> list[str]:
    return list(stage) if isinstance(stage, (list, tuple)) else [stage]  # type: ignore[list-item]
