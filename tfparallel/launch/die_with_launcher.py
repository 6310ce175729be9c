"""Becomes a command that the kernel kills the moment its launcher dies.

    python -I -S die_with_launcher.py LAUNCHER_PID CPUS COMMAND [ARGUMENT ...]

CPUS are those that the command is bound to, such as "0,1"; "" for all that its launcher may use.
A script of its own rather than a `preexec_fn`, which runs Python between fork and exec and can
deadlock in a process that has threads. Imports the standard library only.

Strictly, the kernel waits for the thread that started the process: start workers in a thread that
outlives them, as `run_processes` does.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
COMMAND_NOT_RUN = 127  # what a shell returns


def main() -> None:
    """Tie this process to its launcher, then exec the command."""
    launcher_pid, cpus, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    # Survives the exec. Not inherited by forks: those are found by the job's mark (leftovers.py).
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != launcher_pid:  # it died before the line above
        sys.exit("The launcher is gone.")
    # Python ignores these two in itself, and an exec would pass that on.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"Cannot run {command[0]!r}: {error.strerror}.", file=sys.stderr)
        sys.exit(COMMAND_NOT_RUN)


if __name__ == "__main__":
    main()
