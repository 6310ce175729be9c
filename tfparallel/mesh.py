"""Devices as a grid with named axes, each of which divides one thing of a training.

axis       also called    the devices along it have                     what crosses it
---------  -------------  --------------------------------------------  --------------------------
data       batch          other rows, all of the state                  gradients, once a step
shard      fsdp, zero     other rows, a part of the state each          gradients and weights
pipeline   stage          other layers                                  activations, per microbatch
model      tensor         a part of each matrix                         activations, in each layer

Outer axes come first: devices that are next to one another along a later axis talk the most. The
order in which a user names axes says only which devices are neighbours.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ALIASES = {
    "data": ("batch",),
    "shard": ("fsdp", "zero"),
    "pipeline": ("stage",),
    "model": ("tensor",),
}
AXES = tuple(ALIASES)


@dataclass(frozen=True)
class Mesh:
    """Devices by their places on all axes; an axis that is not there has size 1.

    Attributes:
        devices: names, `[data, shard, pipeline, model]`.
        names: what the user calls each axis that is there, by the names above.
    """

    devices: np.ndarray
    names: Mapping[str, str]

    def size(self, axis: str) -> int:
        """Places along an axis."""
        return self.devices.shape[AXES.index(axis)]

    def over_processes(self, processes: np.ndarray) -> str:
        """For each axis of several places, whether it leaves a process.

        Args:
            processes: of each device its process, `[data, shard, pipeline, model]`.
        """
        axes = {axis: np.moveaxis(processes, i, -1) for i, axis in enumerate(AXES)}
        several = [axis for axis in AXES if self.size(axis) > 1]
        return " ".join(says_of_axis(self.names[axis], axes[axis]) for axis in several)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in AXES if axis in self.names)


def mesh_of(sizes: Sequence[int], axis_names: Sequence[str], devices: Sequence[str]) -> Mesh:
    """A mesh of `devices`, in the order of `axis_names`, the last varying fastest.

    Raises:
        ValueError: for axes of unknown names, of one meaning, or below 1, and for more or fewer
            devices than places.
    """
    known = [_axis(name) for name in axis_names]
    for axis in AXES:
        if known.count(axis) > 1:
            twice = [name for name, each in zip(axis_names, known, strict=True) if each == axis]
            raise ValueError(f"A mesh has each axis once. Received: {twice}, all of them {axis!r}.")
    if any(size < 1 for size in sizes):
        raise ValueError(
            f"Axes have sizes of 1 or more. Received: {_product(axis_names, sizes)} for "
            f"{len(devices)} devices. {_what_fits(axis_names, sizes, len(devices))}"
        )
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"The axes of a mesh multiply to its devices. Received: {_product(axis_names, sizes)} "
            f"for {len(devices)} devices. {_what_fits(axis_names, sizes, len(devices))}"
        )
    grid = np.asarray(devices).reshape(sizes)
    missing = [axis for axis in AXES if axis not in known]
    grid = grid.reshape([*sizes, *[1] * len(missing)])
    order = [*known, *missing]
    grid = grid.transpose([order.index(axis) for axis in AXES])
    return Mesh(grid, dict(zip(known, axis_names, strict=True)))


def says_of_axis(name: str, processes: np.ndarray) -> str:
    """Whether an axis leaves a process.

    Args:
        name: what the user calls it.
        processes: of each device its process, `[..., axis]`.
    """
    size = processes.shape[-1]
    crossed = max(len(set(row)) for row in processes.reshape(-1, size).tolist())
    over = f"crosses {crossed} processes: what it sends goes over their link"
    return f"Axis '{name}' ({size}) {over if crossed > 1 else 'stays inside of a process'}."


def _axis(name: str) -> str:
    for axis, others in ALIASES.items():
        if name == axis or name in others:
            return axis
    every = [*AXES, *(other for others in ALIASES.values() for other in others)]
    alike = difflib.get_close_matches(name, every, n=1)
    hint = f" Did you mean {alike[0]!r}?" if alike else ""
    raise ValueError(f"Axes of a mesh are called {', '.join(AXES)}. Received: {name!r}.{hint}")


def _product(names: Iterable[str], sizes: Sequence[int]) -> str:
    factors = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    return f"{factors} = {math.prod(sizes)}"


def _what_fits(names: Sequence[str], sizes: Sequence[int], num_devices: int) -> str:
    """Meshes that differ in one axis and have a place for each device."""
    fits = []
    for i in range(len(sizes)):
        others = math.prod([*sizes[:i], *sizes[i + 1 :]])
        if others > 0 and num_devices % others == 0:
            fits.append(_product(names, [*sizes[:i], num_devices // others, *sizes[i + 1 :]]))
    if fits:
        return f"What would fit: {'; '.join(fits)}."
    return "No other size of one axis fits: name fewer devices, or change two axes."
