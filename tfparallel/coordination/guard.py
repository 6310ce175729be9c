"""A process beside one that cannot help itself: it ends calls that wait with Python's lock held.

Started by `watch.py`, by its path. It reads a byte from its standard input whenever Python runs in
the process that it guards. While there are none, though tasks of the cluster are silent, it shuts
that process's connections, so that the call fails. Where it may not, or where that does not help,
it says who is silent and kills the process: an end with a name instead of a wait without one.
"""

import json
import os
import select
import signal
import sys
import time

from cut_off import cut_connections  # type: ignore[import-not-found]
from patience import Silence  # type: ignore[import-not-found]
from probe import answering  # type: ignore[import-not-found]

_PERIOD_S = 0.5
_ASK_PERIOD_S = 2.0
_HELD_S = 5.0  # Python has not run for so long: a call of TensorFlow has its lock


def main() -> None:
    """Guards until the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process, with which it ends
    orders = json.loads(sys.argv[1])
    addresses, pid = orders["addresses"], orders["pid"]
    heard_s = asked_s = time.monotonic()
    silence, cut_s = Silence(addresses, heard_s), 0.0
    lost: list[str] = []
    while os.getppid() == pid:
        readable, _, _ = select.select([sys.stdin], [], [], _PERIOD_S)
        if readable:
            if not os.read(sys.stdin.fileno(), 4096):
                return  # the process has ended
            heard_s, cut_s = time.monotonic(), 0.0
            time.sleep(_PERIOD_S)
        if time.monotonic() - asked_s > _ASK_PERIOD_S:
            there = answering(addresses)
            asked_s = time.monotonic()
            silence.heard(asked_s, there)
            lost = silence.longer_than(orders["patience_s"])
        if not lost or time.monotonic() - heard_s < _HELD_S or _is_stopped(pid):
            continue
        names = addresses if orders["cuts_all"] else lost
        if not _cuts([addresses[name] for name in names], pid) or cut_s > orders["cut_for_s"]:
            _kill(pid, ", ".join(f"{name} ({addresses[name]})" for name in lost))
            return
        cut_s += _PERIOD_S


def _cuts(addresses: list[str], pid: int) -> bool:
    """Shuts connections; whether that is allowed."""
    try:
        cut_connections(addresses, pid)
    except PermissionError:
        return False
    except OSError:
        pass  # the process has ended
    return True


def _is_stopped(pid: int) -> bool:
    """Whether the process itself is stopped (SIGSTOP, a debugger): then it waits for nobody."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return True


def _kill(pid: int, lost: str) -> None:
    sys.stderr.write(
        f"Expected all processes of the cluster to answer. Received: no answer from {lost}, while "
        f"TensorFlow waits for it and keeps Python's lock, so that no error can be raised: process "
        f"{pid} is killed. Start the job again. (The guard of process {pid} is speaking.)\n"
    )
    sys.stderr.flush()
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
