"""Branches of a model that devices compute side by side, found in the calls of its layers. Pure.

            / conv 1x1 ------------- \\
    x  ----+- conv 1x1 - conv 3x3 ----+- concatenate          device 0   device 1   device 0
            \\ pooling -- conv 1x1 -- /

Where tensors meet (a layer of several inputs, or the end of the model), what is computed for one of
them only is a branch. Branches that multiply are shared out, the dearest first, each to the device
that has the least to do so far. A branch within a branch stays with it.

Source of the order: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (longest first).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tfparallel.tensor_parallel.pairing import Call


@dataclass(frozen=True)
class BranchDevice:
    """Where a layer is computed.

    Attributes:
        device: its number in the group; None where it is in no branch.
        reason: why it is in none.
    """

    device: int | None
    reason: str = ""


def places(
    calls: Sequence[Call], ends: Sequence[Hashable], parts: int
) -> dict[Hashable, BranchDevice]:
    """Where each layer is computed.

    Args:
        calls: of a model, in their order.
        ends: what the model gives, tensors.
        parts: devices of a group.
    """
    meetings = [call.inputs for call in calls if len(set(call.inputs)) > 1]
    found: dict[int, int] = {}  # of calls, by number
    regions = [_branches(calls, tensors) for tensors in (*meetings, tuple(ends))]
    for branches in sorted(
        regions, key=lambda each: _flops(calls, set().union(*each)), reverse=True
    ):
        _share_out(calls, branches, parts, found)
    return _of_layers(calls, found)


def _branches(calls: Sequence[Call], tensors: Sequence[Hashable]) -> list[set[int]]:
    """For each of the tensors that meet, the calls that nothing else needs; those that multiply."""
    different = list(dict.fromkeys(tensors))
    if len(different) < 2:
        return [set()]
    needed = [_before(calls, tensor) for tensor in different]
    own = [
        calls_of - set().union(*(other for j, other in enumerate(needed) if j != i))
        for i, calls_of in enumerate(needed)
    ]
    used = [
        _only_within(calls, branch, tensor) for branch, tensor in zip(own, different, strict=True)
    ]
    return [branch for branch in used if _flops(calls, branch)] or [set()]


def _before(calls: Sequence[Call], tensor: Hashable) -> set[int]:
    """The calls that a tensor is computed by."""
    wanted, found = {tensor}, set()
    for i in reversed(range(len(calls))):
        if wanted & set(calls[i].outputs):
            found.add(i)
            wanted |= set(calls[i].inputs)
    return found


def _only_within(calls: Sequence[Call], branch: set[int], end: Hashable) -> set[int]:
    """Without what calls elsewhere read, too: another part of the model needs it."""
    left = set(branch)
    for i in sorted(branch, reverse=True):
        readers = {
            j for j, call in enumerate(calls) if set(call.inputs) & (set(calls[i].outputs) - {end})
        }
        if not readers <= left:
            left.discard(i)
    return left


def _flops(calls: Sequence[Call], branch: set[int]) -> int:
    return sum(calls[i].flops for i in branch)


def _share_out(
    calls: Sequence[Call], branches: list[set[int]], parts: int, found: dict[int, int]
) -> None:
    if len(branches) < 2 or any(branch & set(found) for branch in branches):
        return
    load = [0] * parts
    for branch in sorted(branches, key=lambda each: _flops(calls, each), reverse=True):
        device = load.index(min(load))
        load[device] += _flops(calls, branch)
        found |= dict.fromkeys(branch, device)


def _of_layers(calls: Sequence[Call], found: dict[int, int]) -> dict[Hashable, BranchDevice]:
    """A layer that is called in several branches stays where all else is."""
    devices: dict[Hashable, set] = {}
    for i, call in enumerate(calls):
        devices.setdefault(call.layer, set()).add(found.get(i))
    result = {}
    for layer, its in devices.items():
        if len(its) > 1:
            result[layer] = BranchDevice(None, "it is called in several branches")
        else:
            (device,) = its
            result[layer] = BranchDevice(device, "it is in no branch" if device is None else "")
    return result
