"""The benchmark runs, and its contestants train alike; how fast is not for tests to say."""

import json
import subprocess
import sys

import pytest

from tests.multi_process.pool import REPOSITORY

pytestmark = pytest.mark.turns


def test_contestants_are_timed_and_train_alike(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/data_parallel.py", "--quick", "--models", "mlp"]
    command += ["--only", "one device", "tfparallel MultiWorker, fit", "--json", str(figures)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(figures.read_text())["results"]
    assert [result["contestant"] for result in results] == [
        "one device, fit",
        "tfparallel MultiWorker, fit",
    ]
    for result in results:
        assert result["trains_alike"]
        assert len(result["step_s"]) == 2 and min(result["step_s"]) > 0
        assert result["contestant"] in done.stdout
