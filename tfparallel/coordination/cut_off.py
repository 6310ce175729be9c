"""Shuts TCP connections of a process, which is to TensorFlow what it sees when a task dies."""

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable, Iterator

_PIDFD_GETFD = 438  # the system call's number, the same on all machines; Python has no name for it


def cut_connections(addresses: Iterable[str], pid: int | None = None) -> None:
    """Shuts the connections to `addresses` ("host:port"); Linux lists them in /proc.

    Args:
        addresses: of the other ends.
        pid: of the process, None for this one. For another, one needs the right to trace it.

    Raises:
        PermissionError: without that right.
    """
    ends = {end for address in addresses for end in _resolved(address)}
    for connection in _connections(os.getpid() if pid is None else pid):
        with connection, contextlib.suppress(OSError):  # closed since, or not connected
            host, port = connection.getpeername()[:2]
            if (host.removeprefix("::ffff:"), port) in ends:
                connection.shutdown(socket.SHUT_RDWR)


def _connections(pid: int) -> Iterator[socket.socket]:
    """TCP sockets of a process, as descriptors of this one."""
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed since
            if not os.readlink(f"{folder}/{number}").startswith("socket:"):
                continue
            try:
                found = socket.socket(fileno=_duplicate(pid, int(number)))
            except PermissionError:
                raise
            except OSError:
                continue
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found
            else:
                found.close()


def _duplicate(pid: int, number: int) -> int:
    if pid == os.getpid():
        return os.dup(number)
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if (descriptor := libc.syscall(_PIDFD_GETFD, process, number, 0)) < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return descriptor
    finally:
        os.close(process)


def _resolved(address: str) -> list[tuple[str, int]]:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(str(end[0]), int(end[1])) for *_, end in found]
