"""A `keras.distribution.DeviceMesh` as groups of devices: one group computes each replica.

DeviceMesh((2, 3), ("batch", "model"))        batch 0:  [ CPU:0  CPU:1  CPU:2 ]   group 0
                                              batch 1:  [ CPU:3  CPU:4  CPU:5 ]   group 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.mesh import says_of_axis
from tfparallel.replicas.checks import check_devices
from tfparallel.replicas.device_names import devices_here

_BATCH_NAMES = ("batch", "data")


@dataclass(frozen=True)
class MeshGroups:
    """Which devices belong together, and what the axes are called.

    Attributes:
        groups: names of devices, a list of equal length for each replica.
        batch_axis: along which the mesh has replicas, None for a single one.
        model_axis: along which a group has devices, None where each has one.
    """

    groups: tuple[tuple[str, ...], ...]
    batch_axis: str | None
    model_axis: str | None

    @property
    def parts(self) -> int:
        """Devices of a group."""
        return len(self.groups[0])

    def over_processes(self) -> str:
        """Which axis stays inside of a process, and which does not; nothing where there is one."""
        tasks = np.array([[_task(device) for device in group] for group in self.groups])
        if len(set(tasks.flatten())) == 1:
            return ""
        axes = ((self.model_axis, tasks), (self.batch_axis, tasks.T))
        several = [(axis, each) for axis, each in axes if axis is not None and each.shape[1] > 1]
        return " ".join(says_of_axis(axis, each) for axis, each in several)


def mesh_groups(
    mesh: object, batch_dim_name: str | None = None, of_cluster: Sequence[str] | None = None
) -> MeshGroups:
    """The groups of a mesh of one or two axes (others may have size 1).

    Args:
        mesh: a `keras.distribution.DeviceMesh`.
        batch_dim_name: its axis of replicas; by default the one called "batch" or "data", else the
            first of two. A mesh of one axis with another name has a single replica.
        of_cluster: what its devices are, where they are those of several processes: full names, of
            which number 1 is the mesh's `cpu:1`.

    Raises:
        TypeError: for something else than a mesh.
        ValueError: for axes that do not exist, for more than one axis of the model, and for devices
            that do not exist or are named twice.
    """
    if not isinstance(mesh, keras.distribution.DeviceMesh):
        raise TypeError(
            "Expected a LayoutMap over a keras.distribution.DeviceMesh. Received: a LayoutMap with "
            f"device_mesh={mesh!r}. Make it with keras.distribution.LayoutMap(device_mesh)."
        )
    names = list(mesh.axis_names)
    batch = _batch_axis(names, batch_dim_name)
    model = [n for n, size in zip(names, mesh.shape, strict=True) if n != batch and size > 1]
    if len(model) > 1:
        raise ValueError(
            "Expected a mesh of one axis for the batch and one for the model. Received: axes "
            f"{names} of sizes {list(mesh.shape)}, of which {model} would be the model's. Give the "
            "others size 1, or join them into one axis."
        )
    asked = np.asarray(mesh.devices).flatten()
    devices = _existing(asked) if of_cluster is None else _numbered(asked, of_cluster)
    devices = devices.reshape(mesh.shape)
    if batch is not None:
        devices = np.moveaxis(devices, names.index(batch), 0)
    devices = devices.reshape(devices.shape[0] if batch is not None else 1, -1)
    remaining = [n for n in names if n != batch]
    return MeshGroups(
        tuple(tuple(str(name) for name in row) for row in devices),
        batch,
        (model or remaining or [None])[0],
    )


def group_of_ranks(
    mesh: object, batch_dim_name: str | None, devices: Sequence[str], rank: int
) -> MeshGroups:
    """The group of a rank, as it computes with it: on its own device, all of them.

    Args:
        mesh: a `keras.distribution.DeviceMesh`, whose `cpu:1` is that of rank 1.
        batch_dim_name: as of `mesh_groups`.
        devices: one of each rank, full names.
        rank: the caller's.

    Raises:
        TypeError, ValueError: as `mesh_groups`; and for another mesh than one of all ranks in their
            order, of at least two in a group.
    """
    found = mesh_groups(mesh, batch_dim_name, devices)
    in_order = tuple(device for group in found.groups for device in group)
    if in_order != tuple(devices) or found.parts == 1:
        raise ValueError(
            "Ranks that each trace their own part have one device each, those of a replica one "
            f"behind the other on the axis of the model: a mesh of shape (1, {len(devices)}), or "
            "of several replicas of two or more, of "
            f"{[f'cpu:{i}' for i in range(len(devices))]}. Received: devices {found.groups} by "
            f"replica. (Rank {rank} is speaking.)"
        )
    own = (devices[rank],) * found.parts
    return MeshGroups((own,), found.batch_axis, found.model_axis)


def _task(device: str) -> str:
    spec: Any = tf.DeviceSpec.from_string(device)
    return f"{spec.job} {spec.task}"


def _batch_axis(names: list[str], asked: str | None) -> str | None:
    if asked is not None:
        if asked not in names:
            raise ValueError(
                f"batch_dim_name must be an axis of the mesh. Received: {asked!r}; the mesh has "
                f"{names}."
            )
        return asked
    known = [name for name in names if name in _BATCH_NAMES]
    if known:
        return known[0]
    return names[0] if len(names) > 1 else None


def _numbered(names: np.ndarray, of_cluster: Sequence[str]) -> np.ndarray:
    """Full names of the devices of a cluster, of which a mesh calls the second one `cpu:1`."""
    numbers = [int(str(name).rpartition(":")[2]) for name in names]
    if sorted(set(numbers)) != sorted(numbers) or max(numbers) >= len(of_cluster):
        raise ValueError(
            f"The mesh must name each device once, of the {len(of_cluster)} of all processes: "
            f"{list(of_cluster)}. Received: {[str(name) for name in names]}."
        )
    return np.array([of_cluster[number] for number in numbers])


def _existing(names: np.ndarray) -> np.ndarray:
    """Full names of the devices of this process that a mesh calls `cpu:0`."""
    upper = [str(name).upper() if "/" not in str(name) else str(name) for name in names]
    here = [device.name for device in devices_here()]
    if len(set(upper)) > len(here):
        raise ValueError(
            f"The mesh has {len(set(upper))} devices, and this process has {len(here)}: "
            f"{here}. Received: {upper}. Take a "
            "smaller mesh. Logical CPU devices are made by "
            "`tf.config.set_logical_device_configuration` before TensorFlow starts."
        )
    return np.array(check_devices(upper, "devices of the mesh"))
