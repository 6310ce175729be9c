"""What a user gives with a mesh: its sizes or devices, and the options that its axes take."""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from tfparallel.mesh import AXES, Mesh, mesh_of
from tfparallel.pipeline.pipeline_options import PipelineOptions
from tfparallel.replicas.checks import check_devices
from tfparallel.replicas.device_names import all_devices_here
from tfparallel.sharded.options import Sharding


def mesh_here(mesh: object) -> Mesh:
    """The mesh that a user has given, of devices of this process.

    Raises:
        TypeError: for what is no mesh.
        ValueError: for axes of unknown names, or that do not multiply to the devices, and for a
            device in several places, unless these are one stage's on the axis of the model.
    """
    if isinstance(mesh, keras.distribution.DeviceMesh):
        sizes, names = list(mesh.shape), list(mesh.axis_names)
        devices: Sequence = [_full_name(name) for name in np.asarray(mesh.devices).flatten()]
    elif isinstance(mesh, Mapping) and mesh:
        sizes, names = list(mesh.values()), list(mesh)
        devices = all_devices_here()
    else:
        raise TypeError(
            "Expected a keras.distribution.DeviceMesh, or the size of each axis by its name, such "
            f"as {{'data': 2, 'pipeline': 2}}. Received: {mesh!r}."
        )
    found = mesh_of(sizes, names, devices)
    check_devices(_named_once(found), "devices of the mesh")
    return found


def _named_once(mesh: Mesh) -> list[str]:
    """The devices of all places, once where a stage has fewer than others, and fills up with it."""
    group_size = mesh.size("model") if "pipeline" in mesh.names else 1
    groups = mesh.devices.reshape(-1, group_size).tolist()
    return [device for group in groups for device in dict.fromkeys(group)]


def _check_layout_map(mesh: Mesh, layout_map: object) -> None:
    """Refuses a layout of other axes, and one whose own mesh is not this one."""
    if isinstance(layout_map, str) and layout_map == "auto":
        return
    if not isinstance(layout_map, keras.distribution.LayoutMap):
        raise TypeError(
            "Expected `layout_map`, 'auto' or a keras.distribution.LayoutMap. Received: "
            f"{layout_map!r}. Make one with keras.distribution.LayoutMap(device_mesh)."
        )
    _check_axes_of_layouts(mesh, layout_map)
    own = layout_map.device_mesh
    if own is None:
        return
    sizes = dict(zip(own.axis_names, own.shape, strict=True))
    expected = {name: mesh.size(axis) for axis, name in mesh.names.items()}
    if sizes != expected:
        received = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"Expected a LayoutMap over this strategy's mesh, {mesh}. Received: one over a mesh of "
            f"{received}. Make it with keras.distribution.LayoutMap(device_mesh) of the same mesh."
        )


def _check_axes_of_layouts(mesh: Mesh, layout_map: keras.distribution.LayoutMap) -> None:
    """Refuses names by which nothing would be in parts; those of rows and shards change nothing."""
    known = {name for axis, name in mesh.names.items() if axis != "pipeline"}
    for pattern, layout in layout_map.items():
        unknown = [name for name in layout.axes if name is not None and name not in known]
        if unknown:
            raise ValueError(
                f"A layout names, for each dim, the axis {mesh.names['model']!r} of the mesh, or "
                f"None. Received: {tuple(layout.axes)!r} for {pattern!r}, of which {unknown} "
                f"divide no weights of a mesh of {mesh}."
            )


def _full_name(name: object) -> str:
    return str(name).upper() if "/" not in str(name) else str(name)


def sharding_on(mesh: Mesh, shard: Sharding | None) -> Sharding | None:
    """What is in parts on a mesh: an axis of shards has its default."""
    return Sharding() if shard is None and "shard" in mesh.names else shard


def told_of(sizes: Mapping[str, int], shard: Sharding | None, layout_map: object) -> dict:
    """What processes have to be given alike, as they tell one another."""
    patterns = {}
    if isinstance(layout_map, keras.distribution.LayoutMap):
        patterns = {key: str(each.axes) for key, each in layout_map.items()}
    parts = {} if shard is None else {"shard": shard.shard, "min_size": shard.min_size}
    return {"mesh": dict(sizes), "in parts": parts, "layout_map": patterns}


def check_options(
    mesh: Mesh, shard: Sharding | None, pipeline: PipelineOptions | None, layout_map: object
) -> None:
    """Refuses options of axes that the mesh does not have, and those that mean nothing on it.

    Raises:
        TypeError: for another layout.
        ValueError: for all else, saying what to leave out or to take.
    """
    for axis, option, name in (
        ("pipeline", pipeline, "pipeline"),
        ("model", layout_map, "layout_map"),
    ):
        if option is not None and axis not in mesh.names:
            raise ValueError(
                f"`{name}` needs an axis {axis!r} of the mesh. Received: a mesh of {mesh}. Axes "
                f"are called {', '.join(AXES)}."
            )
    if "model" in mesh.names and layout_map is None:
        raise ValueError(
            "An axis of the model needs `layout_map`, a keras.distribution.LayoutMap. Received: "
            f"none, for a mesh of {mesh}."
        )
    if shard is not None and not {"data", "shard"} & {*mesh.names}:
        raise ValueError(
            "`shard` needs an axis 'shard' or 'data', along which state is in parts. Received: a "
            f"mesh of {mesh}."
        )
    if layout_map is not None:
        _check_layout_map(mesh, layout_map)
    if shard is not None and isinstance(layout_map, str):
        raise ValueError(
            "Pieces along an axis of shards are cut when a weight is made, and 'auto' finds parts "
            f"when its model is used. Received: both, on a mesh of {mesh}. Take a LayoutMap, or "
            "leave `shard` out."
        )
    if shard is not None and {"pipeline", "model"} & {*mesh.names}:
        _check_sharding_of_places(mesh, shard)


def _check_sharding_of_places(mesh: Mesh, shard: Sharding) -> None:
    """Refuses what means nothing where a stage or a group of devices gathers what it computes."""
    defaults = Sharding(shard.shard, shard.min_size, host=shard.host)
    names = [field.name for field in dataclasses.fields(shard)]
    given = [name for name in names if getattr(shard, name) != getattr(defaults, name)]
    if given:
        values = ", ".join(f"{name}={getattr(shard, name)!r}" for name in given)
        raise ValueError(
            "Beside a pipeline or an axis of the model a weight is gathered where it is computed "
            "with, and freed behind it: there are no units to gather ahead or to keep. Received: "
            f"Sharding({values}), on a mesh of {mesh}. Leave that out."
        )
