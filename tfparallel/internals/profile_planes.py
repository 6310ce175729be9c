"""What ran, when and on what device: of the planes that TensorFlow's profiler writes."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The names of operations, also of those that graphs get when they are optimised and divided.
from tensorflow.python.framework import op_def_registry

# The form in which the profiler writes.
from tensorflow.tsl.profiler.protobuf import xplane_pb2

__all__ = ["Profile", "Ran", "read_profile"]


class Ran(NamedTuple):
    """An operation that ran.

    Attributes:
        name: of its node.
        operation: its type.
        device: "" if the processor of this host ran it, or launched it on another device; else the
            device whose own clock tells, such as "GPU:0".
        start_s, end_s: seconds since 1970.
    """

    name: str
    operation: str
    device: str
    start_s: float
    end_s: float


class Profile(NamedTuple):
    """What a process ran while it was profiled.

    Attributes:
        ran: its operations.
        start_s, end_s: of the profiler, seconds since 1970.
    """

    ran: list[Ran]
    start_s: float
    end_s: float


def read_profile(path: Path) -> Profile:
    """What the profiler of a process has written.

    Raises:
        RuntimeError: for files of a TensorFlow that does not say when it began and ended.
    """
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    began_ns = _time_ns(space, "profile_start_time")
    end_s = _time_ns(space, "profile_stop_time") * 1e-9
    return Profile(list(_operations(space, began_ns)), began_ns * 1e-9, end_s)


def _operations(space: xplane_pb2.XSpace, began_ns: int) -> Iterator[Ran]:
    for plane in space.planes:
        if plane.name.startswith("/device:GPU:"):
            yield from _of_gpu(plane, plane.name.removeprefix("/device:"), began_ns)
        elif plane.name.startswith("/host:CPU"):
            yield from _of_host(plane, began_ns)


def _time_ns(space: xplane_pb2.XSpace, name: str) -> int:
    """Nanoseconds from 1970 to the profiler's start, from which on its lines count, or its end."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == name:
                return stat.uint64_value or stat.int64_value
    planes = [plane.name for plane in space.planes]
    raise RuntimeError(
        "TensorFlow's profiler is expected to write when it began and ended. Received: no "
        f"{name!r} in the planes {planes}. Supported: TensorFlow 2.20 and 2.21."
    )


def _times(line: xplane_pb2.XLine, event: xplane_pb2.XEvent, began_ns: int) -> tuple[float, float]:
    start_s = (began_ns + line.timestamp_ns) * 1e-9 + event.offset_ps * 1e-12
    return start_s, start_s + event.duration_ps * 1e-12


def _of_host(plane: xplane_pb2.XPlane, began_ns: int) -> Iterator[Ran]:
    for line in plane.lines:
        for event in line.events:
            name, colon, operation = plane.event_metadata[event.metadata_id].name.rpartition(":")
            if colon and _is_operation(operation):
                yield Ran(name, operation, "", *_times(line, event, began_ns))


@functools.cache
def _is_operation(name: str) -> bool:
    """Not what else runs: of C++ (`a::b`), or a server that takes a call."""
    return op_def_registry.get(name) is not None


def _of_gpu(plane: xplane_pb2.XPlane, device: str, began_ns: int) -> Iterator[Ran]:
    """Kernels and copies, which know the operation that has launched them."""
    stats = {key: each.name for key, each in plane.stat_metadata.items()}
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            metadata = plane.event_metadata[event.metadata_id]
            launched = [
                each.str_value or plane.stat_metadata[each.ref_value].name
                for each in (*event.stats, *metadata.stats)
                if stats.get(each.metadata_id) == "tf_op"
            ]
            name, _, operation = (launched[0] if launched else metadata.name).rpartition(":")
            if "memcpy" in metadata.name.lower():
                operation = metadata.name
            yield Ran(name, operation, device, *_times(line, event, began_ns))
