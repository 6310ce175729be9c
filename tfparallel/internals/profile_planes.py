"""What ran, when and on what device: of the planes that TensorFlow's profiler writes.

A plane for the host, whose processors run operations and launch others, one for each GPU, with a
line for each stream, and one for each core of a TPU, which runs instructions of XLA programs:

    /device:TPU:0               XLA Ops          a `while` has those of its body within it
                                Async XLA Ops    the start and the end of what goes on beside them
    /device:TPU:0 SparseCore 0  Sparse Core Ops

Sources: names in xla/tsl/profiler/utils/xplane_schema.cc of openxla/xla, categories and which of
them have others within in xla/tsl/profiler/convert/xla_op_utils.h. That `XLA Ops` of a core come
in `*.xplane.pb` as here, and that a start and an end share a `flow`, is said by those who have read
such files; ours is tested on what XLA writes for CPUs, and never was on a TPU's.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# The names of operations, also of those that graphs get when they are optimised and divided.
from tensorflow.python.framework import op_def_registry

# The form in which the profiler writes.
from tensorflow.tsl.profiler.protobuf import xplane_pb2

__all__ = ["Profile", "ProgramPlanes", "Ran", "instructions", "read_profile"]


class ProgramPlanes(NamedTuple):
    """Where a profile has the instructions of XLA programs.

    Attributes:
        planes: matches a whole name; its first group is the device's.
        lines: matches lines of what the device computes, one after another.
        lines_beside: matches lines of what goes on meanwhile.
        stat: what instructions have and other events of these lines have not; "" without others.
    """

    planes: re.Pattern[str]
    lines: re.Pattern[str]
    lines_beside: re.Pattern[str]
    stat: str = ""


_TPUS = ProgramPlanes(
    re.compile(r"/device:(TPU:\d+(?: SparseCore \d+)?)"),
    re.compile(r"(?:XLA|Sparse Core) Ops"),
    re.compile(r"Async XLA Ops"),
)


class Ran(NamedTuple):
    """An operation that ran.

    Attributes:
        name: of its node; of an instruction, that of a node that it was compiled of.
        operation: its type; of an instruction its category, such as "all-reduce".
        device: "" if the processor of this host ran it, or launched it on another device; else the
            device whose own clock tells, such as "GPU:0", or "TPU:0 async" for what goes on beside
            its instructions.
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
        else:
            yield from instructions(plane, began_ns)


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
    line_ns = line.timestamp_ns  # from 1970, unless TensorFlow has subtracted when it began
    start_s = (line_ns + (began_ns if line_ns < began_ns else 0)) * 1e-9 + event.offset_ps * 1e-12
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


def instructions(
    plane: xplane_pb2.XPlane, began_ns: int, names: ProgramPlanes = _TPUS
) -> Iterator[Ran]:
    """What a device ran of XLA programs; nothing of planes that are none of a device's.

    Args:
        plane: of a profile.
        began_ns: when the profiler did, nanoseconds since 1970.
        names: of planes and lines with instructions.
    """
    found = names.planes.fullmatch(plane.name)
    if found is None:
        return
    for line in plane.lines:
        ran, flows = _ran_of_line(plane, line, found[1], began_ns, names.stat)
        if names.lines.fullmatch(line.name):
            yield from _innermost(ran)
        elif names.lines_beside.fullmatch(line.name):
            yield from _from_start_to_end(ran, flows, f"{found[1]} async")


def _ran_of_line(
    plane: xplane_pb2.XPlane, line: xplane_pb2.XLine, device: str, began_ns: int, stat: str
) -> tuple[list[Ran], list[object]]:
    """Instructions, and what those have in common that start and end the same; None of others."""
    ran, flows = [], []
    for event in line.events:
        metadata = plane.event_metadata[event.metadata_id]
        stats = _stats(plane, (*metadata.stats, *event.stats))
        if stat and stat not in stats:
            continue
        name = str(stats.get("hlo_op") or metadata.display_name or metadata.name)
        opcode = name.lstrip("%").partition(" ")[0].partition(".")[0]
        category = str(stats.get("hlo_category", ""))
        operation = opcode if not category or category.startswith("async-") else category
        node = str(stats.get("tf_op", "")).partition(":")[0]
        ran.append(Ran(node, operation, device, *_times(line, event, began_ns)))
        flows.append(stats.get("flow"))
    return ran, flows


def _stats(plane: xplane_pb2.XPlane, stats: Iterable[xplane_pb2.XStat]) -> dict[str, object]:
    """Values by name; a text may be kept once for the plane, and referred to."""
    values: dict[str, object] = {}
    for each in stats:
        field = each.WhichOneof("value")
        value = getattr(each, field) if field else None
        if field == "ref_value":
            value = plane.stat_metadata[value].name
        values[plane.stat_metadata[each.metadata_id].name] = value
    return values


def _innermost(ran: Iterable[Ran]) -> Iterator[Ran]:
    """The parts of each in which nothing runs that is within it."""
    around: list[Ran] = []
    now_s = 0.0
    for each in [*sorted(ran, key=lambda each: (each.start_s, -each.end_s)), None]:
        start_s = each.start_s if each else float("inf")
        while around and around[-1].end_s <= start_s:
            done = around.pop()
            if done.end_s > now_s:
                yield done._replace(start_s=now_s)
                now_s = done.end_s
        if around and each and start_s > now_s:
            yield around[-1]._replace(start_s=now_s, end_s=start_s)
        if each:
            around.append(each)
            now_s = start_s


def _from_start_to_end(ran: Iterable[Ran], flows: Iterable[object], device: str) -> Iterator[Ran]:
    """One for the instructions that start and end the same."""
    by_flow: dict[object, list[Ran]] = {}
    for i, (each, flow) in enumerate(zip(ran, flows, strict=True)):
        by_flow.setdefault(("alone", i) if flow is None else flow, []).append(each)
    for same in by_flow.values():
        first = min(same, key=lambda each: each.start_s)
        yield first._replace(device=device, end_s=max(each.end_s for each in same))
