"""A spawner for all tests of this folder: importing TensorFlow once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parameter_server.cluster import ServerProcesses
from tests.parameter_server.program import Program
from tests.parameter_server.spawner import Spawner

CASES = "tests.parameter_server.chief_cases"


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
        return Program(spawner, CASES, tmp_path, name, **variables).result()

    return run_case


@pytest.fixture
def start_chief(spawner: Spawner, tmp_path: Path) -> Callable[..., Program]:
    """Starts a program of `chief_cases.py`, for servers that the test has made."""

    def start_chief(name: str, servers: ServerProcesses, **variables: str) -> Program:
        variables = {**servers.environment("chief", 0), **variables}
        return Program(spawner, CASES, tmp_path, name, **variables)

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
