"""A process that has imported TensorFlow and forks a fresh one for every training: 0 s, not 4 s.

It must never start TensorFlow itself, so that a fork finds it as after an import.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Zygote:
    """Starts processes that call a function of `tests.callbacks.trainings`, and kills them."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.callbacks.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, function: str, *arguments, kill_after_s: float | None = None) -> int:
        """Calls `function(*arguments)` in a new process; returns its status, -9 if it was killed.

        Args:
            function: its name in `tests.callbacks.trainings`.
            arguments: text or numbers.
            kill_after_s: when to send SIGKILL, from the call of the function.
        """
        request = json.dumps([function, [str(a) for a in arguments], kill_after_s])
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=10)


def _serve() -> None:
    trainings = importlib.import_module("tests.callbacks.trainings")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a training prints is not an answer
    for line in sys.stdin:
        function, arguments, kill_after_s = json.loads(line)
        child = os.fork()
        if child == 0:
            _call(getattr(trainings, function), arguments)
        answers.write(f"{_wait(child, kill_after_s)}\n")
        answers.flush()


def _call(function, arguments) -> None:
    status = 1
    try:
        function(*arguments)
        status = 0
    except SystemExit as exit_:
        status = exit_.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, kill_after_s: float | None) -> int:
    deadline = time.monotonic() + (60 if kill_after_s is None else kill_after_s)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.002)


if __name__ == "__main__":
    _serve()
