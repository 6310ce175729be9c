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

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tfparallel.pipeline.plans.counts import check_counts
from tfparallel.replicas.device_names import Device, Devices, device_names

Stage: TypeAlias = Device | Sequence[Device]  # the device of a stage, or its devices


def groups_of_stages(devices: Devices | Sequence[Stage]) -> list[list[str]]:
    """The names of each stage's devices.

    Raises:
        ValueError: for a stage without a device.
    """
    if isinstance(devices, Device):
        return [[name] for name in device_names(devices, "devices")]
    groups = [
        device_names([stage] if isinstance(stage, Device) else stage, "devices")
        for stage in devices
    ]
    if not all(groups):
        raise ValueError(f"Every stage must have a device. Received: devices={list(devices)!r}.")
    return groups


def pipelines_of(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """For each pipeline the device of each stage; as many as let each stage share evenly."""
    count = math.lcm(*map(len, groups))
    return [[group[i % len(group)] for group in groups] for i in range(count)]


def microbatches_of_each(
    num_microbatches: int | None, groups: Sequence[Sequence[str]], count: int
) -> int | None:
    """How many microbatches each of `count` pipelines has; None where there is one by default.

    Raises:
        ValueError: where the microbatches of a batch are not divided evenly.
    """
    if count == 1:
        return num_microbatches
    if num_microbatches is None:
        return math.ceil(4 * len(groups) / count)
    if num_microbatches % count:
        below = num_microbatches // count * count
        would = [n for n in (below, below + count) if n > 0]
        raise ValueError(
            "Devices of a stage take microbatches in turn, so that their numbers "
            f"{list(map(len, groups))} divide num_microbatches evenly. "
            f"Received: num_microbatches={num_microbatches}. What would fit: "
            f"{', '.join(map(str, would))}."
        )
    return num_microbatches // count


@dataclass(frozen=True)
class ChosenLater:
    """Devices of which each stage gets one or several, once its layers are measured.

    Attributes:
        devices: of all stages together.
        num_stages: how many they are for.
        num_pipelines: that divide the microbatches. Numbers of devices of a stage divide it.
        num_microbatches: of each pipeline.
    """

    devices: tuple[str, ...]
    num_stages: int
    num_pipelines: int
    num_microbatches: int

    @property
    def before(self) -> list[list[str]]:
        """The pipelines as long as nothing is measured: one device for each stage."""
        one_each = [*self.devices[: self.num_stages - 1], self.devices[-1]]
        return [one_each] * self.num_pipelines

    @property
    def allowed(self) -> list[int]:
        """How many devices a stage may have."""
        return [k for k in range(1, self.num_pipelines + 1) if self.num_pipelines % k == 0]

    def pipelines(self, counts: Sequence[int]) -> list[list[str]]:
        """For each pipeline the device of each stage, of which there are so many.

        The last stage has the last devices, where metrics are.
        """
        *starts, _ = itertools.accumulate(counts, initial=0)
        starts[-1] = len(self.devices) - counts[-1]
        groups = [self.devices[i : i + k] for i, k in zip(starts, counts, strict=True)]
        return [[group[i % len(group)] for group in groups] for i in range(self.num_pipelines)]


def chosen_later(
    groups: Sequence[Sequence[str]], num_stages: int, num_microbatches: int | None
) -> ChosenLater:
    """What is known of stages that are to get several devices, before their layers are.

    There are as many pipelines as a stage can have devices, or, where microbatches do not divide
    by that, the next number below by which they do.

    Raises:
        ValueError: for devices that are already those of a stage, for fewer than stages, and for
            microbatches that do not divide.
    """
    if any(len(group) > 1 for group in groups):
        raise ValueError(
            "Either the devices of each stage are given, or num_stages, and they are chosen. "
            f"Received: devices={list(groups)!r} and num_stages={num_stages}."
        )
    check_counts(num_stages=num_stages)
    names = [name for (name,) in groups]
    most = len(names) - num_stages + 1
    if most < 1:
        raise ValueError(
            f"Every stage must have a device. Received: num_stages={num_stages} for {len(names)} "
            f"devices. Use at most {len(names)} stages; several on a device are those of "
            "schedule='interleaved_1f1b'."
        )
    microbatches = num_microbatches or _microbatches_by_default(num_stages, most)
    count = max(k for k in range(1, most + 1) if microbatches % k == 0)
    if count == 1 < most:
        raise ValueError(
            "Devices of a stage take microbatches in turn, so that their number divides "
            f"num_microbatches. Received: num_microbatches={microbatches}, which nothing from 2 to "
            f"{most} divides, the most devices that one of {num_stages} stages can have of "
            f"{len(names)}. What would fit: {microbatches + -microbatches % most}."
        )
    return ChosenLater(tuple(names), num_stages, count, microbatches // count)


def _microbatches_by_default(num_stages: int, most: int) -> int:
    """At least 4 for each stage, of which a stage may have as many devices as there can be."""
    return math.ceil(4 * num_stages / most) * most


def first_with_copy(places: Sequence[str]) -> tuple[int, ...]:
    """For each pipeline the first one that has the same device in this place."""
    return tuple(list(places).index(place) for place in places)
