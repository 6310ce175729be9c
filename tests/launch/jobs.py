"""Jobs to try the launcher on: small scripts, a launcher in a process, and who is still alive."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil

from tfparallel.launch.processes import WorkerCommand

ROOT = Path(__file__).parents[2]

# A worker with three children: one in its process group, one silent, one in a session of its own.
FAMILY = """
import os, subprocess, time
sleep = ["sleep", "600"]
children = [
    subprocess.Popen(sleep),
    subprocess.Popen(sleep, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
    subprocess.Popen(sleep, start_new_session=True),
]
print("pids", os.getpid(), *(child.pid for child in children), flush=True)
"""
SLEEP = "\ntime.sleep(600)\n"


def python_command(label: str, source: str, **variables: str) -> WorkerCommand:
    """A worker that runs Python source."""
    argv = (sys.executable, "-c", textwrap.dedent(source))
    return WorkerCommand(label, argv, {**os.environ, **variables})


class Launcher:
    """`tfparallel launch --standalone` in a process; ended with everything it started at exit."""

    def __init__(self, folder: Path, source: str, *options: str, workers: int = 2, **popen):
        script = folder / "train.py"
        script.write_text(textwrap.dedent(source))
        env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        # Under nohup the tests ignore SIGHUP, and so would the launcher.
        self.process = subprocess.Popen(
            ["env", "--default-signal=HUP", sys.executable, "-m", "tfparallel", "launch"]
            + ["--standalone", "--workers", str(workers), *options, str(script)],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen},
            cwd=folder,
            env={**env, "PYTHONPATH": str(ROOT)},
        )
        self.members: list[psutil.Process] = []

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait()
        for member in self.members:
            if is_alive(member):
                member.kill()

    def wait_for_members(self, num_workers: int = 2) -> list[psutil.Process]:
        """Read until every worker has printed "pids ..." and return all those processes."""
        while num_workers:
            line = self.process.stdout.readline()
            assert line, f"The launcher ended early: {self.process.stderr.read()}"
            if match := re.fullmatch(r"\[worker \d+\] pids ([\d ]+)\n", line):
                self.members += [psutil.Process(int(pid)) for pid in match[1].split()]
                num_workers -= 1
        return self.members

    def guard(self) -> psutil.Process:
        """The process that waits for the launcher's end."""
        children = psutil.Process(self.process.pid).children()
        return next(c for c in children if any("leftovers" in part for part in c.cmdline()))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        self.process.send_signal(number)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def survivors(processes: list[psutil.Process], timeout_s: float = 10.0) -> list[psutil.Process]:
    """The processes that are still alive after at most `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while (alive := [p for p in processes if is_alive(p)]) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return alive
