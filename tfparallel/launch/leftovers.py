"""The mark that all processes of a job carry, by which none is left behind.

The mark is an environment variable, so children inherit it however they were started. Signals to
a process group miss a child that opened a session of its own, and a launcher that is killed with
SIGKILL signals nobody. Therefore a guard, a process of this file, waits until the launcher has
ended, in whatever way, and then kills everything that still carries the mark:

    launcher --- pipe ---> guard        end of file: the launcher is done, or dead
       |
       +-- worker (mark) -- child (mark) -- its child (mark)

Imports the standard library only, to start fast.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

MARK_VARIABLE = "TFPARALLEL_JOB"

# A process can fork while we look, so we look until a pass finds nothing. The bound is for one
# that cannot be killed: it waits for a dead disk, say.
_MAX_PASSES = 100
_PAUSE_S = 0.02


@contextlib.contextmanager
def marked_job() -> Iterator[str]:
    """Yield the value of `MARK_VARIABLE` for the processes of one job; kill all of them at exit."""
    # A job started by a process of another job is part of that job.
    enclosing_job = os.environ.get(MARK_VARIABLE)
    job = secrets.token_hex(8)
    mark = f"{enclosing_job}/{job}" if enclosing_job else job
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the launcher
    )
    assert guard.stdin is not None
    try:
        yield mark
    finally:
        guard.stdin.close()
        guard.wait()


def marked_pids(mark: str) -> list[int]:
    """The living processes that carry `mark`, or the mark of a job within that job."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _carries(pid, mark)]


def kill_marked(mark: str) -> None:
    """Kill every process that carries `mark`, and those they start meanwhile."""
    kill_until_none(lambda: marked_pids(mark), _kill, time.sleep)


def kill_until_none(
    living: Callable[[], list[int]],
    kill: Callable[[int], None],
    sleep: Callable[[float], None],
) -> None:
    """Kill processes until a look finds none.

    Args:
        living: the numbers of those to kill.
        kill: kills one, which may have ended.
        sleep: for so many seconds.
    """
    for _ in range(_MAX_PASSES):
        pids = living()
        if not pids:
            return
        for pid in pids:
            kill(pid)
        sleep(_PAUSE_S)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _carries(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")  # a zombie has none
    except OSError:  # gone, or another user's
        return False
    setting = f"{MARK_VARIABLE}={mark}".encode()
    return any(v == setting or v.startswith(setting + b"/") for v in variables)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_marked(sys.argv[1])
