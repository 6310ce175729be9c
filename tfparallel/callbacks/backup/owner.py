"""Which process this is, and whether another one of this machine still runs.

A process number is given again once its process has ended, and means something else in each
container. So a process is known by the machine's boot and its namespace of numbers, its number, and
when it started.
"""

import contextlib
import datetime
import os
import socket
import sys
from pathlib import Path

from tfparallel.callbacks.backup.schema import Owner

_LONGEST_JOB = 200
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat after the name; proc(5) counts from 3
_ENDED = ("Z", "X", "x")  # a killed process whose parent has not noticed is in the list, too


def this_process(job: str = "") -> Owner:
    """The process that asks.

    Args:
        job: its name; by default what Slurm or Kubernetes calls it, or the command line.
    """
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        job=(job or _job())[:_LONGEST_JOB],
        since=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=_machine(),
        started=_stat(os.getpid())[1],
    )


def is_this_process(owner: Owner) -> bool:
    """Whether `owner` is the process that asks."""
    me = this_process()
    return _identity(owner) == _identity(me) and bool(me.machine)


def has_ended(owner: Owner) -> bool:
    """Whether `owner` is known to have ended: False for what runs elsewhere."""
    if not owner.machine or owner.machine != _machine():
        return False
    try:
        os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # it is another user's; /proc may tell its start all the same
    state, started = _stat(owner.pid)
    return state in _ENDED or (started != "" and started != owner.started)


def _identity(owner: Owner) -> tuple:
    return owner.machine, owner.pid, owner.started


def _job() -> str:
    for variable, name in (("SLURM_JOB_ID", "Slurm job "), ("JOB_NAME", "job ")):
        if os.environ.get(variable):
            return name + os.environ[variable]
    return " ".join(sys.argv) or "python"


def _machine() -> str:
    """This boot of this machine, and the namespace of its process numbers; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process and when it started, in ticks since boot; empty if unknown."""
    with contextlib.suppress(OSError, IndexError):
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[_STATE], fields[_STARTED]
    return "", ""
