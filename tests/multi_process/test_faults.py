"""Workers that die or disagree: the others say who and why, and end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multi_process.forking import forked
from tests.multi_process.pool import REPOSITORY, cluster_environments
from tests.parameter_server.spawner import Child

pytestmark = pytest.mark.turns

WORKER = "tests.multi_process.disagreeing_worker"
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "1"}  # warnings are shown


def start_workers(folder: Path, *arguments: str) -> list[Child]:
    """Two workers, each writing to `folder/<rank>.log`."""
    return [
        forked(WORKER, arguments, {**ENVIRONMENT, **environment}, folder / f"{rank}.log")
        for rank, environment in enumerate(cluster_environments(2))
    ]


def start_fresh_workers(folder: Path, *arguments: str) -> list[subprocess.Popen]:
    """The same, whose Python also begins by itself, as where it matters how it ends."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", WORKER, *arguments],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **ENVIRONMENT, **environment},
            stdout=(folder / f"{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, environment in enumerate(cluster_environments(2))
    ]


def wait(workers: list[Child] | list[subprocess.Popen], timeout_s: float) -> list[int | None]:
    """Exit statuses of `workers`; kills what is left when time is up."""
    try:
        return [worker.wait(timeout_s) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    ("difference", "told"),
    [
        ("number of variables", ["create a variable", "rank 0: sgd", "rank 1: dense_1"]),
        ("shape", ["agree when they create a variable", "float32[6, 4]", "float32[6, 5]"]),
        ("number of batches", ["agree when they call fit", '"batches": 8', '"batches": 4']),
        ("length of generator", ["batch 4 is [[[8, 6], [8, 4]], None] by rank"]),
        ("call", ["call fit", "call evaluate"]),
    ],
)
def test_workers_that_disagree_are_told_so_by_rank(tmp_path, difference, told):
    start = start_fresh_workers if difference == "length of generator" else start_workers
    wait(start(tmp_path, difference), timeout_s=300)
    for rank in (0, 1):
        log = (tmp_path / f"{rank}.log").read_text()
        assert "DisagreementError" in log, log
        assert f"Rank {rank} is speaking" in log
        for text in told:
            assert text in log, log
        assert "finalizing GeneratorDataset" not in log, "an iterator outlived Python"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_named_by_the_other_within_30_seconds(tmp_path, victim):
    report = tmp_path / "training"
    workers = start_workers(tmp_path, "killed", str(report))
    try:
        deadline = time.monotonic() + 60
        while not report.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert report.exists(), (tmp_path / "0.log").read_text()
        os.kill(workers[victim].pid, signal.SIGKILL)
        assert wait([workers[1 - victim]], timeout_s=30)[0] not in (0, None)
    finally:
        wait(workers, timeout_s=10)
    log = (tmp_path / f"{1 - victim}.log").read_text()
    assert f"task:{victim}" in log or f"PeerLostError: rank {victim} (127.0.0.1:" in log
