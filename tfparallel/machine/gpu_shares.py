"""Which GPUs of this machine each worker of a job gets: equal shares, none twice."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_LIMIT_S = 20.0
_LISTED = re.compile(r"^(?P<part>\s*MIG )?.*\(UUID: (?P<uuid>[^)]+)\)")


def gpus_of_machine(environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> list[str]:
    """The GPUs that a process with this environment would see, as CUDA names them.

    What `CUDA_VISIBLE_DEVICES` says holds: numbers, UUIDs or MIG instances. Without it, those
    that `nvidia-smi -L` lists by UUID, or, where it is missing, the driver's, by number.
    """
    if (visible := environ.get(VISIBLE)) is not None:
        return _listed_before_the_first_bad(visible)
    if shutil.which("nvidia-smi") is None:
        return [str(i) for i, _ in enumerate(driver.iterdir())] if driver.is_dir() else []
    return gpus_of_driver_by_uuid()


def gpus_of_driver_by_uuid() -> list[str]:
    """The UUIDs of all GPUs or MIG instances; none where `nvidia-smi` is missing or fails."""
    command = ["nvidia-smi", "-L"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return gpus_in_list(done.stdout)


def gpus_in_list(listed: str) -> list[str]:
    """The UUIDs in what `nvidia-smi -L` prints: MIG instances in the place of the GPU they divide.

    `GPU 0: NVIDIA A100 (UUID: GPU-5d0f...)`, and below it, where it is divided,
    `  MIG 3g.20gb Device 0: (UUID: MIG-c6d4...)`.
    """
    found: list[list[str]] = []
    for line in listed.splitlines():
        if (match := _LISTED.match(line)) is None:
            continue
        if match["part"] is None:
            found.append([match["uuid"]])
        elif found:
            found[-1].append(match["uuid"])
    return [each for own in found for each in (own[1:] or own)]


def share_gpus(gpus: Sequence[str], num_workers: int, may_share: bool = False) -> list[str]:
    """`CUDA_VISIBLE_DEVICES` of each worker.

    Args:
        gpus: of the machine, as CUDA names them.
        num_workers: among which they are divided; what cannot be divided evenly stays idle, as
            workers must have equally many.
        may_share: whether several workers may have one GPU.

    Raises:
        ValueError: for more workers than GPUs that may not share.
    """
    if not gpus or len(gpus) >= num_workers:
        each = len(gpus) // num_workers
        return [",".join(gpus[i * each : (i + 1) * each]) or "-1" for i in range(num_workers)]
    if not may_share:
        raise ValueError(
            f"Expected a GPU for each worker. Received: {num_workers} workers, {len(gpus)} GPUs "
            f"({', '.join(gpus)}). Start {len(gpus)} workers, let them share GPUs by --share-gpus, "
            f"or train on CPUs: {VISIBLE}=-1."
        )
    return [gpus[i % len(gpus)] for i in range(num_workers)]


def _listed_before_the_first_bad(visible: str) -> list[str]:
    """As CUDA reads it: a name that is none ends the list."""
    gpus = []
    for name in (each.strip() for each in visible.split(",")):
        if not re.fullmatch(r"\d+|GPU-\S+|MIG-\S+", name):
            break
        gpus.append(name)
    return list(dict.fromkeys(gpus))
