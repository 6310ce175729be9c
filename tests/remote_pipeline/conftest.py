"""Runs the programs of `cases.py`, forked from a process that has imported TensorFlow once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parameter_server.program import Program
from tests.parameter_server.spawner import Spawner

CASES = "tests.remote_pipeline.cases"


@pytest.fixture(scope="session")
def spawner() -> Iterator[Spawner]:
    """Forks chiefs."""
    spawner = Spawner(CASES)
    yield spawner
    spawner.close()


@pytest.fixture
def run_case(spawner: Spawner, tmp_path: Path) -> Callable[[str], dict]:
    """Runs a program; gives what it returned, or fails with the end of its log."""
    return lambda name: Program(spawner, CASES, tmp_path, name).result()
