"""Which axes of a mesh go over the processes of a job, and what a process has of it.

    {"data": 2, "pipeline": 2} on 2 processes of 2 devices each

    data 0    stage 0: device 0 of rank 0    stage 1: device 1 of rank 0
    data 1    stage 0: device 0 of rank 1    stage 1: device 1 of rank 1

Devices are in the order of their ranks, so that the axes which are named first go over processes.
Those talk the least: rows may ("data"), and parts of the state ("shard").
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tfparallel.mesh import AXES, Mesh, mesh_of


@dataclass(frozen=True)
class MeshOverProcesses:
    """A mesh of the devices of several processes.

    Attributes:
        mesh: all places, its devices called by their numbers, rank after rank.
        inner: what each process has of it, the size of each axis by its name, where the axis of
            data alone goes over processes, or `has_shares`; else None.
        num_copies: of what is in parts, where processes share one.
        has_shares: whether processes share one copy of the state beside the axes of `inner`.
    """

    mesh: Mesh
    inner: Mapping[str, int] | None
    num_copies: int = 1
    has_shares: bool = False


def laid_over_processes(
    sizes: Mapping[str, int], num_processes: int, devices_each: int, has_parts: bool
) -> MeshOverProcesses:
    """What goes over processes of a mesh of all their devices.

    Args:
        sizes: of each axis by its name, the outermost first.
        num_processes: of the job.
        devices_each: of a process.
        has_parts: whether state is in parts where there is no axis "shard", along "data".

    Raises:
        ValueError: saying what would fit, for axes that do not multiply to all devices, for a
            pipeline or an axis of the model that leaves a process, for parts of the state that do
            beside those without taking all processes, and for shards whose neighbours are not
            neighbours in the job.
    """
    numbers = [str(number) for number in range(num_processes * devices_each)]
    mesh = mesh_of(list(sizes.values()), list(sizes), numbers)
    places = mesh.devices.astype(int)
    ranks = places // devices_each
    crossing = [axis for i, axis in enumerate(AXES) if np.diff(ranks, axis=i).any()]
    job = f"{num_processes} processes of {devices_each} devices each"
    parts_along = "shard" if "shard" in mesh.names else "data"
    for axis in ("pipeline", "model"):
        if axis in crossing:
            raise ValueError(
                f"On {job}, the stages of a pipeline and the parts of a matrix are inside of a "
                f"process. Received: {mesh}, whose axis {axis!r} leaves it. Name 'data' first, of "
                f"a multiple of {num_processes}, and give the other axes the {devices_each} "
                "devices of a process."
            )
    is_whole = not has_parts and "shard" not in mesh.names
    if is_whole or parts_along not in crossing:
        return MeshOverProcesses(mesh, _of_a_process(mesh, sizes, num_processes))
    if mesh.size("pipeline") * mesh.size("model") > 1:
        if mesh.size(parts_along) != num_processes or crossing != [parts_along]:
            raise ValueError(
                "Beside a pipeline or an axis of the model, all processes share one copy of the "
                f"state, or none do. Received: {mesh} on {job}. Name {parts_along!r} first, of "
                f"{num_processes}; or 'data', of a multiple of it, and 'shard' behind it."
            )
        return MeshOverProcesses(mesh, _without(mesh, sizes, parts_along), has_shares=True)
    copies = mesh.size("data") if parts_along == "shard" else 1
    if num_processes % copies or (np.diff(places.flatten()) < 0).any():
        raise ValueError(
            "Processes that share a copy of the state are neighbours, and whole: 'data' is named "
            f"before 'shard', and its size divides {num_processes}. Received: "
            f"{dict(sizes)} on {job}. What would fit: {{'shard': {places.size}}}."
        )
    return MeshOverProcesses(mesh, None, copies)


def _without(mesh: Mesh, sizes: Mapping[str, int], axis: str) -> dict[str, int]:
    """The sizes of axes in a process, where all of `axis` goes over processes."""
    others = {name: size for name, size in sizes.items() if name != mesh.names[axis]}
    return others if "data" in mesh.names and axis != "data" else {"data": 1, **others}


def _of_a_process(mesh: Mesh, sizes: Mapping[str, int], num_processes: int) -> dict[str, int]:
    """The sizes of axes in a process, where rows alone go over processes."""
    inner = dict(sizes)
    inner[mesh.names["data"]] //= num_processes
    return inner
