"""What a protocol needs of the machine it runs on: a clock, threads, a way to wait for one another.

Protocols ask a `Machine` instead of `time` and `threading`. So the same code runs here and on a
simulated clock, in an order of steps that is drawn (`tests/simulation`).
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tfparallel.coordination.waiting import Clock


class Changes(AbstractContextManager, Protocol):
    """A lock that one thread may take several times, and news for those who wait: `Condition`."""

    def wait(self, timeout: float | None = None) -> bool:
        """Lets go until `notify_all`, or so many seconds; whether there was news."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Lets go until `predicate()`, or so many seconds; what it gave last."""

    def notify_all(self) -> None:
        """Wakes all that wait."""


class Running(Protocol):
    """A thread."""

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended."""

    def is_alive(self) -> bool:
        """Whether it has not."""


def _start(target: Callable[[], None], name: str, is_daemon: bool = True) -> Running:
    thread = threading.Thread(target=target, name=name, daemon=is_daemon)
    thread.start()
    return thread


@dataclass(frozen=True)
class Machine(Clock):
    """A clock, and threads.

    Attributes:
        changes: makes a lock of its own.
        start: runs a function in a thread of a name; a program that ends waits for it, but for
            daemons.
    """

    changes: Callable[[], Changes] = threading.Condition
    start: Callable[..., Running] = _start


THIS_MACHINE = Machine()
