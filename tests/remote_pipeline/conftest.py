"""Runs the programs of `cases.py`, forked from a process that has imported TensorFlow once."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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

    def run_case(name: str) -> dict:
        log = Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=tmp_path)[1])
        variables = {"CHIEF_CASE": name, "CASE_FOLDER": str(tmp_path)}
        process = spawner.spawn(f"{CASES}:main", variables, log)
        status = process.wait(120.0)
        process.kill()
        text = log.read_text(errors="replace")
        results = [line for line in text.splitlines() if line.startswith("RESULT ")]
        assert results, f"exit status {status}\n{text[-4000:]}"
        return {**json.loads(results[-1].removeprefix("RESULT ")), "status": status}

    return run_case
