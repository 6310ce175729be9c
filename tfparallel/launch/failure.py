"""What there is to say about the worker that failed first.

A return code is `subprocess`'s: -n for a process that signal n killed.
"""

import signal
from collections.abc import Sequence

_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_LINES_WITHOUT_TRACEBACK = 30


def exit_status(returncode: int) -> int:
    """The status that a shell reports: 128 + n for a process that signal n killed."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_end(returncode: int) -> str:
    """How a process ended: "exit status 1", or "killed by SIGKILL (exit status 137)"."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # real-time signals have numbers only
        name = f"signal {-returncode}"
    return f"killed by {name} (exit status {exit_status(returncode)})"


def failure_report(label: str, returncode: int, stderr_tail: Sequence[bytes]) -> bytes:
    """A heading that names the worker and how it ended, then what it said last.

    Args:
        label: of the worker that failed.
        returncode: how it ended.
        stderr_tail: the last lines of its standard error.
    """
    heading = f"======== {label} failed first: {describe_end(returncode)} ========"
    lines = [heading.encode(), *(last_traceback(stderr_tail) or [b"(no error output)"])]
    if returncode == -signal.SIGKILL:
        lines.append(
            b"This launcher did not send that SIGKILL. When nobody else did, the kernel was out "
            b"of memory (`dmesg` says so): use a smaller batch or fewer workers."
        )
    return b"\n".join(lines) + b"\n"


def last_traceback(lines: Sequence[bytes]) -> Sequence[bytes]:
    """The lines from the last Python traceback on; the last few if there is none.

    A chain of exceptions counts as one traceback, since its first part names the cause. So does
    an exception group.
    """
    starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return lines[-_LINES_WITHOUT_TRACEBACK:]
    start = starts.pop()
    while starts and _belong_together(lines[starts[-1] : start + 1]):
        start = starts.pop()
    return lines[start:]


def _belong_together(lines: Sequence[bytes]) -> bool:
    """Whether the traceback that starts at the last line continues the one at the first."""
    is_nested_in_group = lines[-1].lstrip().startswith(b"|")
    return is_nested_in_group or any(line.strip(b" |") in _CHAINED for line in lines)
