"""A spawner for all tests of this folder: importing TensorFlow once."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parameter_server.cluster import ServerProcesses
from tests.parameter_server.spawner import Spawner

CASES = "tests.parameter_server.chief_cases"


class Chief:
    """A program of `chief_cases.py` on its way."""

    def __init__(self, spawner: Spawner, folder: Path, name: str, **variables: str):
        self._log = Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)[1])
        variables = {"CHIEF_CASE": name, "CASE_FOLDER": str(folder), **variables}
        self.process = spawner.spawn(f"{CASES}:main", variables, self._log)

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
        """What the program returned, with its log and exit status."""
        status = self.process.wait(timeout_s)
        self.process.kill()
        results = [line for line in self.log.splitlines() if line.startswith("RESULT ")]
        assert results, f"exit status {status}\n{self.log[-4000:]}"
        result = json.loads(results[-1].removeprefix("RESULT "))
        return {**result, "log": self.log, "status": status}


@pytest.fixture(scope="session")
def spawner() -> Iterator[Spawner]:
    """Forks chiefs and servers."""
    spawner = Spawner(CASES)
    yield spawner
    spawner.close()


@pytest.fixture
def run_case(spawner: Spawner, tmp_path: Path) -> Callable[..., dict]:
    """Runs a program of `chief_cases.py`; fails with the end of its log."""

    def run_case(name: str, **variables: str) -> dict:
        return Chief(spawner, tmp_path, name, **variables).result()

    return run_case


@pytest.fixture
def start_chief(spawner: Spawner, tmp_path: Path) -> Callable[..., Chief]:
    """Starts a program of `chief_cases.py`, for servers that the test has made."""

    def start_chief(name: str, servers: ServerProcesses, **variables: str) -> Chief:
        return Chief(spawner, tmp_path, name, **servers.environment("chief", 0), **variables)

    return start_chief


@pytest.fixture
def make_servers(spawner: Spawner) -> Iterator[Callable[..., ServerProcesses]]:
    """Starts the servers of a cluster; they end with the test."""
    made: list[ServerProcesses] = []

    def make_servers(num_workers: int = 2, num_ps: int = 2, **variables: str) -> ServerProcesses:
        made.append(ServerProcesses(num_workers, num_ps, spawner, **variables))
        return made[-1]

    yield make_servers
    for servers in made:
        servers.close()
