"""A spawner for all tests of this folder: importing TensorFlow once."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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

    def run_case(name: str, timeout_s: float = 120.0, **variables: str) -> dict:
        log = tmp_path / f"{name}.log"
        variables = {"CHIEF_CASE": name, "CASE_FOLDER": str(tmp_path), **variables}
        chief = spawner.spawn(f"{CASES}:main", variables, log)
        status = chief.wait(timeout_s)
        chief.kill()
        text = log.read_text(errors="replace")
        results = [line for line in text.splitlines() if line.startswith("RESULT ")]
        assert results, f"exit status {status}\n{text[-4000:]}"
        return {**json.loads(results[-1].removeprefix("RESULT ")), "log": text, "status": status}

    return run_case
