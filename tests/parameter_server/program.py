"""Programs that a test runs in processes of their own, forked by a `Spawner`."""

import json
import tempfile
import time
from pathlib import Path

from tests.parameter_server.spawner import Spawner


class Program:
    """A program of a module of cases on its way.

    Args:
        spawner: of the module.
        cases: the module's name.
        folder: where the log is, and what the program writes.
        name: of the case.
        **variables: of the environment.
    """

    def __init__(self, spawner: Spawner, cases: str, folder: Path, name: str, **variables: str):
        self._log = Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)[1])
        variables = {"CHIEF_CASE": name, "CASE_FOLDER": str(folder), **variables}
        self.process = spawner.spawn(f"{cases}:main", variables, self._log)

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def wait_for(self, line: str, timeout_s: float = 90.0) -> None:
        """Waits until it has printed `line`."""
        deadline_s = time.monotonic() + timeout_s
        while line not in self.log.splitlines():
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.log[-4000:]
            time.sleep(0.02)

    def result(self, timeout_s: float = 120.0) -> dict:
        """What the program returned, its log and exit status; fails with the end of its log."""
        status = self.process.wait(timeout_s)
        self.process.kill()
        results = [line for line in self.log.splitlines() if line.startswith("RESULT ")]
        assert results, f"exit status {status}\n{self.log[-4000:]}"
        result = json.loads(results[-1].removeprefix("RESULT "))
        return {**result, "log": self.log, "status": status}
