"""TPU Pods: one process, cores on several hosts, each of which reads the input for its own."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.tpu import extended
from tfparallel.tpu.padded_batches import BatchSize, parts_on_host


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=560,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )


def printed_by(*arguments: str) -> dict:
    """The line of JSON that a program of two hosts prints; fails with its end if there is none."""
    done = run(*arguments)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-4000:]
    return json.loads(results[-1].removeprefix("RESULT "))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["arrays", "shuffled", "whole"])
def test_cores_of_two_hosts_train_as_one_device(case):
    """Losses, weights, predictions in their order, and `*_on_batch`; of shuffled, uneven data."""
    differences = printed_by("tests.tpu.two_hosts", case)
    assert {"weights/0", "predicted", "on_batch", "history/loss"} <= set(differences)
    assert max(differences.values()) < 1e-9, differences


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("of_python", "PyDataset"),
        ("generated", "a generator or another function of Python"),
        ("drawn", "RandomUniform without a seed"),
    ],
)
def test_what_hosts_would_not_read_alike_is_refused(case, names):
    error = printed_by("tests.tpu.two_hosts", case)["error"]
    assert "Each of the 2 hosts of a TPU Pod" in error and names in error


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", ["arrays", "shuffled"])
def test_a_killed_training_on_two_hosts_goes_on_as_one_device_that_was_not(case, tmp_path):
    """In the midst of the second epoch, of shuffled data, whose batches are uneven."""
    arguments = ["tests.tpu.killed_pod", case, str(tmp_path / "backups")]
    killed = run(*arguments)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    received = printed_by(*arguments)
    assert received["steps"] in (1, 2)  # of 6: the fourth was saved, the fifth may be
    assert {"weights/0", "optimizer/0", "history/loss"} <= set(received["differences"])
    assert max(received["differences"].values()) < 1e-9, received


@pytest.mark.long
def test_a_step_is_drawn_of_the_cores_of_all_hosts():
    lanes = printed_by("tests.tpu.two_hosts", "lanes")
    cores = [f"worker {host} CPU:{core}" for host in (0, 1) for core in (0, 1)]
    assert {"compute", "update"} <= set.intersection(*(set(lanes[core]) for core in cores)), lanes


def test_each_host_keeps_the_rows_of_its_cores():
    """8 rows, 2 hosts of 2 cores; and 5 of them, of which cores get 2, 1, 1, 1."""
    size, hosts = BatchSize(8, may_differ=False), [range(2), range(2, 4)]
    rows = [parts_on_host(size, 4, own)(tf.range(8)).data for own in hosts]
    np.testing.assert_array_equal(rows, [[0, 1, 2, 3], [4, 5, 6, 7]])
    size = BatchSize(8, may_differ=True)
    batches = [parts_on_host(size, 4, own)(tf.range(5)) for own in hosts]
    np.testing.assert_array_equal([x.data for x in batches], [[0, 1, 2, 3], [3, 4, 4, 4]])
    np.testing.assert_array_equal([x.totals for x in batches], [[5, 5, 5, 0], [5, 0, 5, 0]])


def test_a_host_of_a_pod_is_told_that_it_is_not_alone(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.1,10.0.0.2")
    said = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *args: said.append(text % args))
    with pytest.raises(RuntimeError, match="found none"):
        extended.connect_to_tpu("local")
    assert len(said) == 1 and "one of the 2 of a TPU Pod" in said[0]
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.1")
    with pytest.raises(RuntimeError, match="found none"):
        extended.connect_to_tpu("local")
    assert len(said) == 1
