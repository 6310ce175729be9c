"""Cores and memory that a process really has, and the threads it is told to use."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tfparallel.machine.finding import Finding

# A collective holds a thread of TensorFlow's inter-op pool while it waits for others. The pool has
# one thread a core by default: on a machine with few, all can be held by replicas that wait, and
# the last one never gets to run. It is a hang, not slowness.
MIN_INTEROP_THREADS = 8
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60  # version 1 of cgroups writes a number near 2**63
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def cores_of_cgroup(root: Path = _CGROUP) -> float | None:
    """How many cores' time the cgroup of this process may use; None for all."""
    if text := _read(root / "cpu.max"):  # version 2: "200000 100000", or "max 100000"
        quota, period = text.split()
    else:
        quota = _read(root / "cpu" / "cpu.cfs_quota_us") or "-1"
        period = _read(root / "cpu" / "cpu.cfs_period_us") or "100000"
    return None if quota in ("max", "-1") else int(quota) / int(period)


def memory_of_cgroup(root: Path = _CGROUP) -> int | None:
    """The most bytes that the cgroup of this process may use; None for no limit."""
    text = _read(root / "memory.max") or _read(root / "memory" / "memory.limit_in_bytes") or "max"
    return None if text == "max" or int(text) >= _UNLIMITED_BYTES else int(text)


def usable_cores(root: Path = _CGROUP) -> float:
    """The cores this process has: what it may run on, within its cgroup's share of time."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota = cores_of_cgroup(root)
    return allowed if quota is None else min(allowed, quota)


def check_cores(root: Path = _CGROUP) -> Iterator[Finding]:
    """Cores that exist but are not this process's: TensorFlow starts threads for all it sees."""
    exist, allowed, quota = os.cpu_count() or 1, len(os.sched_getaffinity(0)), cores_of_cgroup(root)
    usable = usable_cores(root)
    if quota is not None and quota < allowed:
        yield Finding(
            "cores",
            "warning",
            f"{quota:g} cores' time of the {allowed} that are seen (cgroup)",
            "set TF_NUM_INTRAOP_THREADS and OMP_NUM_THREADS to "
            f"{max(1, math.floor(quota))}: TensorFlow starts threads for {allowed}, which the "
            "kernel stops in turn",
        )
    else:
        yield Finding("cores", "ok", f"{usable:g} of the machine's {exist}")


def threads_told(environ: Mapping[str, str] = os.environ) -> int:
    """Threads that an operation may use as the environment says; 0 where it says nothing."""
    told = [int(text) for name in _THREADS[:2] if (text := environ.get(name, "")).isdigit()]
    return min((number for number in told if number), default=0)


def check_threads(environ: Mapping[str, str] = os.environ, cores: float = 0.0) -> Iterator[Finding]:
    """Numbers of threads that are told to TensorFlow, beside the cores there are.

    Args:
        environ: of the job.
        cores: that it has; `usable_cores()` by default.
    """
    cores = cores or usable_cores()
    bad = False
    for name in _THREADS[:2]:
        text = environ.get(name, "")
        if not text:
            continue
        if not text.isdigit() or int(text) == 0:
            if text != "0":  # which lets TensorFlow choose
                bad = True
                yield Finding("threads", "problem", f"{name}={text}", "give a number of threads")
        elif int(text) * 2 <= cores or int(text) > 2 * cores:
            bad = True
            which = "fewer" if int(text) < cores else "more"
            yield Finding(
                "threads",
                "warning",
                f"{name}={text}, {which} than the {cores:g} cores",
                f"unset {name}, or set it to {max(1, math.floor(cores))}",
            )
    if not bad:
        told = [f"{name}={environ[name]}" for name in _THREADS if environ.get(name)]
        yield Finding("threads", "ok", ", ".join(told) or "TensorFlow chooses")


def check_memory(root: Path = _CGROUP) -> Iterator[Finding]:
    """Memory that is free, within the cgroup's limit."""
    memory, limit = psutil.virtual_memory(), memory_of_cgroup(root)
    free = min(memory.available, limit if limit is not None else memory.available)
    total = min(memory.total, limit if limit is not None else memory.total)
    found = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}"
    if free < 2**30:
        yield Finding("memory", "warning", found, "TensorFlow alone takes 0.5 GiB a process")
    else:
        yield Finding("memory", "ok", found)


def check_load() -> Iterator[Finding]:
    """Whether others use the cores as well."""
    load, cores = os.getloadavg()[0], usable_cores()
    found = f"{load:.1f} processes want to run on {cores:g} cores"
    if load > 1.5 * cores:
        yield Finding("load", "warning", found, "another job runs here: times say little")
    else:
        yield Finding("load", "ok", found)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
