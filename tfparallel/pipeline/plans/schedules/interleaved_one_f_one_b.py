"""Interleaved 1F1B: several chunks of the model on each device."""

from collections.abc import Iterator

from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.counts import check_counts
from tfparallel.pipeline.plans.schedule import Schedule


def interleaved_one_f_one_b(
    num_devices: int, num_microbatches: int, chunks_per_device: int = 2
) -> Schedule:
    """Schedule 1F1B over `num_devices * chunks_per_device` stages, stage s on device s % devices.

        device 0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a
        device 1  .   F0a F1a F0b B0b F1b B1b B0a B1a .

    Microbatches go in groups of P = `num_devices`: a group passes a device's first chunk (a), then
    its second (b), and so on. The last device then waits at the start for P - 1 passes of a chunk,
    not of all that a device holds.

    Bubble, with P devices, v chunks on each, M microbatches and the same forward time f and
    backward time b on every stage (of which there are v times as many, each v times as short):
    for `M >= P` each device is idle for `(P - 1) * (f + b)`, a fraction `(P - 1) / (v * M + P - 1)`
    of the makespan `(v * M + P - 1) * (f + b)`. For `M < P` the makespan is
    `(v * P + M - 1) * (f + b)`: the way of the last microbatch through all stages.

    Live activations on device d, all its chunks together: at most
    `min(v * M, (v - 1) * G + 2 * (P - d) - 1)`, where G is the size of a group; each is of a stage
    v times as small.

    Where M is no multiple of P, Megatron-LM refuses. Here the groups are made larger than P by as
    little and as evenly as possible, the larger ones first, which leaves the bubble as it is: G is
    `ceil(M / floor(M / P))`, below 2 * P. For `M < P` there is one group, of M.

    Args:
        num_devices: devices.
        num_microbatches: microbatches of a batch; any number, also below `num_devices`.
        chunks_per_device: stages on each device, at least 2; more make the bubble smaller, and
            the copies between devices more. Default: 2, the least.

    Raises:
        ValueError: if a count is not a whole number of at least 1, or if there is only one chunk.

    Source: Megatron-LM, Narayanan et al. 2021, section 2.2.2 and figure 4 (bottom),
    https://arxiv.org/abs/2104.04473
    """
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    check_counts(chunks_per_device=chunks_per_device)
    if chunks_per_device == 1:
        raise ValueError(
            "Interleaved 1F1B needs at least 2 chunks per device. Received: chunks_per_device=1. "
            "With one chunk, use the schedule '1f1b'."
        )
    groups = _group(num_microbatches, num_devices)
    orders = [[*_order(d, num_devices, groups, chunks_per_device)] for d in range(num_devices)]
    return Schedule("interleaved_1f1b", orders)


def _group(num_microbatches: int, num_devices: int) -> list[range]:
    """Cut the microbatches into as many groups of at least `num_devices` as there can be."""
    num_groups = max(1, num_microbatches // num_devices)
    size, num_larger = divmod(num_microbatches, num_groups)
    starts = [group * size + min(group, num_larger) for group in range(num_groups + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:])]


def _order(
    device: int, num_devices: int, groups: list[range], chunks_per_device: int
) -> Iterator[Action]:
    stages = range(device, num_devices * chunks_per_device, num_devices)
    forward = [(stage, m) for group in groups for stage in stages for m in group]
    backward = [(stage, m) for group in groups for stage in reversed(stages) for m in group]
    # The first backward pass is that of the last chunk: before it go a group for every other
    # chunk and, as in 1F1B, a pass for every device behind, there and back.
    num_ahead = (chunks_per_device - 1) * len(groups[0]) + 2 * (num_devices - device - 1)
    num_warmup = min(num_ahead, len(forward))
    for stage, microbatch in forward[:num_warmup]:
        yield Action(stage, microbatch, "forward")
    for index, (stage, microbatch) in enumerate(backward):
        if num_warmup + index < len(forward):
            yield Action(*forward[num_warmup + index], "forward")
        yield Action(stage, microbatch, "backward")
