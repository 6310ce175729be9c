"""Ends the calls that wait for a task that does not answer any more.

A call to a process that was killed fails by itself. A call to one that is stopped, or behind a dead
link, waits for ever: nobody closes its connection. So a thread asks every task every few seconds.
While one has not answered for too long, the thread shuts this process's connections, again and
again, which is to TensorFlow what it sees when a task dies: the call fails.

Some calls of TensorFlow keep Python's lock while they wait: those that tell a task of a new
function, as when a step is traced. No thread of Python runs then, this one neither. So a second
process, the guard (`guard.py`), does the same from outside when it has not heard of the thread.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tfparallel.coordination.cut_off import cut_connections
from tfparallel.coordination.patience import Silence
from tfparallel.coordination.probe import answering

_PERIOD_S = 2.0
_CUT_FOR_S = 60.0  # by the guard; then it ends this process
_CUT_PERIOD_S = 0.5  # a new connection to a stopped process would be given 20 s to begin


class Watch:
    """Asks tasks all the time whether they are there.

    Args:
        addresses: "host:port" by the name of the task.
        patience_s: how long a task may be silent.
        is_wanted: whether there are calls that shall fail, as the tasks of these names are silent.
        cuts_all: the connections to all tasks are shut, as those that answer may be waiting for
            the silent ones; else those to the silent ones only.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        patience_s: float,
        is_wanted: Callable[[list[str]], bool],
        cuts_all: bool,
    ):
        self._addresses, self._patience_s = dict(addresses), patience_s
        self._is_wanted, self._cuts_all = is_wanted, cuts_all
        self._lost: list[str] = []
        self._guard = _start_guard(self._addresses, patience_s, cuts_all)
        thread = threading.Thread(target=self._watch, name="tfparallel watch", daemon=True)
        thread.start()

    @property
    def patience_s(self) -> float:
        """How long a task may be silent."""
        return self._patience_s

    def lost(self) -> list[str]:
        """The tasks that have been silent for too long, with their addresses."""
        return self._described(self._lost)

    def absent(self) -> list[str]:
        """The tasks that do not answer now, with their addresses."""
        there = answering(self._addresses)
        return self._described([name for name in self._addresses if name not in there])

    def _described(self, names: list[str]) -> list[str]:
        return [f"{name} ({self._addresses[name]})" for name in names]

    def _watch(self) -> None:
        silence = Silence(self._addresses, time.monotonic())
        while True:
            # As of the answers: this process may itself be stopped for long, from here on.
            there = answering(self._addresses)
            silence.heard(time.monotonic(), there)
            self._lost = lost = silence.longer_than(self._patience_s)
            for _ in range(round(_PERIOD_S / _CUT_PERIOD_S)):
                self._tell_guard()
                if lost and self._is_wanted(lost):
                    names = self._addresses if self._cuts_all else lost
                    cut_connections([self._addresses[name] for name in names])
                time.sleep(_CUT_PERIOD_S)

    def _tell_guard(self) -> None:
        """Says that Python runs."""
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: the thread does what it can
            os.write(self._guard.stdin.fileno(), b".")


def watch_once(
    addresses: Mapping[str, str], patience_s: float, is_wanted: Callable, cuts_all: bool
) -> Watch:
    """A `Watch` of these tasks; the one that this process has, if there is one like it."""
    key = f"{addresses} {is_wanted} {cuts_all}"
    if key not in _watches:
        _watches[key] = Watch(addresses, patience_s, is_wanted, cuts_all)
    return _watches[key]


def always(silent: list[str]) -> bool:
    """Calls that wait for silent tasks shall fail at any time."""
    del silent
    return True


_watches: dict[str, Watch] = {}  # of this process, by what they watch


def _start_guard(
    addresses: Mapping[str, str], patience_s: float, cuts_all: bool
) -> subprocess.Popen:
    """It ends with this process."""
    orders = {
        "addresses": dict(addresses),
        "patience_s": patience_s,
        "cuts_all": cuts_all,
        "pid": os.getpid(),
        "cut_for_s": _CUT_FOR_S,
    }
    # By its path: it imports nothing but its neighbours, and is there in a tenth of a second.
    script = Path(__file__).with_name("guard.py")
    return subprocess.Popen(
        [sys.executable, "-E", "-S", "-s", script, json.dumps(orders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
