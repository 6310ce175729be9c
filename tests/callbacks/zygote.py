"""A process that has imported TensorFlow and forks a fresh one for every training: 0 s, not 4 s.

It must never start TensorFlow itself, so that a fork finds it as after an import.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]

LONGEST_S = 180.0  # of a training, on a machine with much else to do; then it hangs


class Zygote:
    """Starts processes that call a function of a module, and kills them.

    Args:
        module: where the functions are.
    """

    def __init__(self, module: str = "tests.callbacks.trainings"):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.callbacks.zygote", module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def run(self, function: str, *arguments, kill_after_s: float | None = None, saves=()) -> int:
        """Calls `function(*arguments)` in a new process; returns its status, -9 if it was killed.

        Args:
            function: its name in the module.
            arguments: text or numbers.
            kill_after_s: when to send SIGKILL, from the call of the function.
            saves: a folder and a number n: count `kill_after_s` from the beginning of the n-th
                backup that is written there.
        """
        return self.run_together(function, [arguments], kill_after_s, saves)[0]

    def run_together(
        self, function: str, calls, kill_after_s: float | None = None, saves=()
    ) -> list[int]:
        """Like `run`, in one process for each tuple of arguments in `calls`, all at once.

        Once one has failed or died, the others have 20 seconds to end by themselves.
        """
        texts = [[str(argument) for argument in arguments] for arguments in calls]
        saves = [str(value) for value in saves]
        self._process.stdin.write(json.dumps([function, texts, kill_after_s, saves]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def log(self) -> str:
        """What all trainings so far have printed."""
        self._log.seek(0)
        return self._log.read()

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=10)


def _serve() -> None:
    module = importlib.import_module(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a training prints is not an answer
    for line in sys.stdin:
        function, calls, kill_after_s, saves = json.loads(line)
        children = []
        for arguments in calls:
            children.append(os.fork())
            if children[-1] == 0:
                _call(getattr(module, function), arguments)
        answers.write(json.dumps(_wait(children, kill_after_s, saves)) + "\n")
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


def _wait(children: list[int], kill_after_s: float | None, saves: list[str]) -> list[int]:
    deadline = time.monotonic() + (LONGEST_S if saves or kill_after_s is None else kill_after_s)
    statuses: dict[int, int] = {}
    started = set(_begun(saves))
    num_before = len(started)
    while len(statuses) < len(children):
        if saves and len(started) < num_before + int(saves[1]):
            started |= set(_begun(saves))
            if len(started) >= num_before + int(saves[1]):
                deadline = time.monotonic() + kill_after_s
        for child in [child for child in children if child not in statuses]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
                if statuses[child] != 0:
                    deadline = min(deadline, time.monotonic() + 20)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.0005 if saves else 0.002)
    return [statuses[child] for child in children]


def _begun(saves: list[str]) -> list[str]:
    """The backups that are being written now: looking often sees all of them."""
    folder = saves[0] if saves else ""
    return [name for name in _names(folder) if name.startswith("writing-")]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder) if folder else []
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    _serve()
