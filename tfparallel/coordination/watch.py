"""Ends the calls that wait for a task that does not answer any more.

A call to a process that was killed fails by itself. A call to one that is stopped, or behind a dead
link, waits for ever: nobody closes its connection. So a thread asks every task every few seconds.
While one has not answered for too long, the thread shuts this process's connections to all tasks,
again and again, which is to TensorFlow what it sees when a task dies: the call fails. Those to the
other tasks too, as they may be waiting for the silent one.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping

from tfparallel.coordination.probe import is_answering

_PERIOD_S = 2.0
_CUT_PERIOD_S = 0.5  # a new connection to a stopped process would be given 20 s to begin


class Watch:
    """Asks tasks all the time whether they are there.

    Args:
        addresses: "host:port" by the name of the task.
        patience_s: how long a task may be silent.
        is_wanted: whether there are calls that shall fail, as the tasks of these names are silent.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        patience_s: float,
        is_wanted: Callable[[list[str]], bool] = lambda silent: True,
    ):
        self._addresses, self._patience_s = dict(addresses), patience_s
        self._is_wanted = is_wanted
        thread = threading.Thread(target=self._watch, name="tfparallel watch", daemon=True)
        thread.start()

    def _watch(self) -> None:
        silent_since_s: dict[str, float] = {}
        while True:
            there = answering(self._addresses)
            now_s = time.monotonic()
            for name in self._addresses:
                if name in there:
                    silent_since_s.pop(name, None)
                else:
                    silent_since_s.setdefault(name, now_s)
            # As of the answers: this process may itself be stopped for long, from here on.
            lost = [
                n for n, since_s in silent_since_s.items() if now_s - since_s > self._patience_s
            ]
            for _ in range(round(_PERIOD_S / _CUT_PERIOD_S)):
                if lost and self._is_wanted(lost):
                    _cut_connections(self._addresses)
                time.sleep(_CUT_PERIOD_S)


def answering(addresses: Mapping[str, str]) -> list[str]:
    """The names of those tasks that answer, asked all at once."""
    found: list[str] = []

    def ask(name: str) -> None:
        if is_answering(addresses[name]):
            found.append(name)

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [name for name in addresses if name in found]


def _cut_connections(addresses: Mapping[str, str]) -> None:
    """Shuts the TCP connections of this process to `addresses`; Linux lists them in /proc."""
    ends = {end for address in addresses.values() for end in _resolved(address)}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since, or not connected
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                host, port = connection.getpeername()[:2]
                if (host.removeprefix("::ffff:"), port) in ends:
                    connection.shutdown(socket.SHUT_RDWR)


def _resolved(address: str) -> list[tuple[str, int]]:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(str(end[0]), int(end[1])) for *_, end in found]
