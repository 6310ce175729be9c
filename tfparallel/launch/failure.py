"""What there is to say about the worker that failed first."""

import os
import signal
from collections.abc import Sequence

_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_LINES_WITHOUT_TRACEBACK = 30


def exit_status(result: os.waitid_result) -> int:
    """The exit status as shells count it: 128 + the signal's number for a killed process."""
    if result.si_code == os.CLD_EXITED:
        return result.si_status
    return 128 + result.si_status


def describe_status(status: int) -> str:
    """The exit status in words: "exit status 137, killed by SIGKILL"."""
    try:
        return f"exit status {status}, killed by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"exit status {status}"


def failure_report(label: str, status: int, stderr_tail: Sequence[bytes]) -> bytes:
    """A heading that names the worker and its status, then what it said last.

    Args:
        label: of the worker that failed.
        status: its exit status.
        stderr_tail: the last lines of its standard error.
    """
    heading = f"======== {label} failed first: {describe_status(status)} ========"
    lines = [heading.encode(), *(last_traceback(stderr_tail) or [b"(no error output)"])]
    if status == 128 + signal.SIGKILL:
        lines.append(
            b"SIGKILL does not come from this launcher before a failure. On Linux it is mostly the "
            b"kernel's, for want of memory: see `dmesg`, and lower the batch size."
        )
    return b"\n".join(lines) + b"\n"


def last_traceback(lines: Sequence[bytes]) -> Sequence[bytes]:
    """The lines from the last Python traceback on; the last few if there is none.

    A chain of exceptions counts as one traceback, since its first part names the cause.
    """
    starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return list(lines)[-_LINES_WITHOUT_TRACEBACK:]
    start = starts.pop()
    while starts and any(line.strip() in _CHAINED for line in list(lines)[starts[-1] : start]):
        start = starts.pop()
    return list(lines)[start:]
