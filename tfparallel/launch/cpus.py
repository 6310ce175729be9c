"""Which CPUs of this machine each process of a job runs on, so that none waits for another's."""

from collections.abc import Iterable
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def share_cpus(
    cpus: Iterable[int], num_processes: int, topology: Path = _TOPOLOGY
) -> list[list[int]]:
    """Divides CPUs evenly: neighbours together, and both threads of a core.

    Args:
        cpus: the CPUs to divide, by the kernel's number.
        num_processes: among how many processes.
        topology: the kernel's folder about CPUs.

    Returns:
        The CPUs of each process: as many as of any other, or one more.

    Raises:
        ValueError: if a process would get none.
    """
    ordered = sorted(cpus, key=lambda cpu: (*_place(topology / f"cpu{cpu}" / "topology"), cpu))
    if len(ordered) < num_processes:
        raise ValueError(
            f"Expected a CPU for each process. Received: {num_processes} processes, "
            f"{len(ordered)} CPUs."
        )
    ends = [i * len(ordered) // num_processes for i in range(num_processes + 1)]
    return [ordered[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def _place(folder: Path) -> tuple[int, ...]:
    """The socket and the core of a CPU; in a machine that does not tell, all are in one place."""
    names = ("physical_package_id", "core_id")
    return tuple(
        int(path.read_text()) if (path := folder / name).is_file() else 0 for name in names
    )
