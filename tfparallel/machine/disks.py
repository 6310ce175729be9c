"""Folders that a job writes to: can it, is there room, is it on a disk that survives."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from tfparallel.machine.finding import Finding

_LITTLE_BYTES = 2**30
_OVER_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "glusterfs", "9p")
_IN_MEMORY = ("tmpfs", "ramfs")


def file_system_of(folder: Path) -> str:
    """The type of file system that a folder is on, such as "ext4"."""
    resolved = folder.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    while resolved not in mounts and resolved != resolved.parent:
        resolved = resolved.parent
    return mounts.get(resolved, "unknown")


def check_folder(folder: str | os.PathLike, is_shared: bool = False) -> Iterator[Finding]:
    """Whether a job can write here.

    Args:
        folder: where backups or logs go.
        is_shared: whether several hosts are to see the same files.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.write(b"1")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield Finding("folder", "problem", f"{path}: {error.strerror}", "name one that is writable")
        return
    kind, free = file_system_of(path), shutil.disk_usage(path).free
    found = f"{path} ({kind}, {free / 2**30:.1f} GiB free)"
    if free < _LITTLE_BYTES:
        yield Finding("folder", "warning", found, "make room: backups are written beside the last")
    elif kind in _IN_MEMORY:
        yield Finding("folder", "warning", found, "it is gone with the machine: name a disk")
    elif is_shared and kind not in _OVER_NETWORK and not kind.startswith("fuse"):
        yield Finding(
            "folder",
            "warning",
            f"{found} looks like this host's own disk",
            "several hosts need one folder: a network file system, or a URL such as s3://",
        )
    else:
        yield Finding("folder", "ok", found)


def check_open_files() -> Iterator[Finding]:
    """How many files and connections a process may have open."""
    limit = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0]
    if 0 <= limit < 1024:
        yield Finding("open files", "warning", f"{limit} at most", "ulimit -n 65536")
    else:
        yield Finding("open files", "ok", f"{limit} at most" if limit >= 0 else "no limit")
