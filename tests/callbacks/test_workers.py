"""Several workers: one backup of all, whichever of them is killed, and whoever comes back."""

import os
import re

import numpy as np
import pytest

from tests.callbacks.results import assert_equal_results
from tests.callbacks.zygote import Zygote
from tests.launch.jobs import ROOT, Launcher
from tests.multi_process.pool import cluster_environments
from tfparallel.callbacks.backup.storage import Storage
from tfparallel.callbacks.preemption import EXIT_STATUS

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module")
def zygote():
    started = Zygote()
    yield started
    started.close()


@pytest.fixture(scope="module")
def expected(zygote, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    assert train(zygote, "", folder) == [0, 0]
    return folder


def train(zygote, backups, folder, kill_at=(0, 0), training="multi_worker"):
    """Trains with two workers; each writes its results to `folder`."""
    configurations = [environment["TF_CONFIG"] for environment in cluster_environments(2)]
    calls = [
        (backups, folder / f"{rank}.npz", kill_at[rank], configurations[rank]) for rank in (0, 1)
    ]
    return zygote.run_together(training, calls)


def assert_all_equal(expected, folder):
    for rank in (0, 1):
        assert_equal_results(expected / f"{rank}.npz", folder / f"{rank}.npz", atol=1e-6)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kill_at", [(0, 6), pytest.param((7, 7), marks=pytest.mark.long)])
def test_killed_workers_end_as_the_uninterrupted_ones(zygote, expected, tmp_path, kill_at):
    statuses = train(zygote, tmp_path / "backups", tmp_path, kill_at)
    assert all(statuses) and -9 in statuses
    assert train(zygote, tmp_path / "backups", tmp_path) == [0, 0]
    assert_all_equal(expected, tmp_path)
    assert not (tmp_path / "backups").exists()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("sigterm_at", [pytest.param((0, -6), marks=pytest.mark.long), (-5, -6)])
def test_sigterm_to_one_worker_saves_on_all_at_one_step(zygote, expected, tmp_path, sigterm_at):
    statuses = train(zygote, tmp_path / "backups", tmp_path, sigterm_at)
    assert statuses == [EXIT_STATUS, EXIT_STATUS], zygote.log()
    assert train(zygote, tmp_path / "backups", tmp_path) == [0, 0]
    assert_all_equal(expected, tmp_path)


@pytest.mark.timeout(200)
def test_data_of_unknown_length_go_on_and_other_data_are_found(zygote, tmp_path):
    training, backups = "multi_worker_of_unknown_length", tmp_path / "backups"
    uninterrupted = tmp_path / "uninterrupted"
    uninterrupted.mkdir()
    assert train(zygote, "", uninterrupted, training=training) == [0, 0], zygote.log()
    train(zygote, backups, tmp_path, (7, 7), training)
    assert train(zygote, backups, tmp_path, training=f"{training}_other") == [1, 1]
    assert "BackupError: A training goes on with the data of its backup" in zygote.log()
    assert train(zygote, backups, tmp_path, training=training) == [0, 0], zygote.log()
    assert "read again" not in zygote.log()
    assert_all_equal(uninterrupted, tmp_path)


@pytest.mark.timeout(200)
def test_workers_save_together_by_the_chiefs_clock(zygote, expected, tmp_path):
    timed = "multi_worker_by_the_clock"
    train(zygote, tmp_path / "backups", tmp_path, (9, 9), timed)
    assert len(Storage(tmp_path / "backups").numbers()) == 2, zygote.log()
    assert train(zygote, tmp_path / "backups", tmp_path, training=timed) == [0, 0]
    assert_all_equal(expected, tmp_path)


@pytest.mark.timeout(200)
def test_workers_with_parts_of_the_weights_save_the_whole_together(zygote, expected, tmp_path):
    train(zygote, tmp_path / "backups", tmp_path, (6, 6), "sharded_workers")
    assert train(zygote, tmp_path / "backups", tmp_path, training="sharded_workers") == [0, 0]
    assert_all_equal(expected, tmp_path)  # what data parallel workers end with


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "compressed",
    [
        pytest.param("multi_worker_compressed", marks=pytest.mark.long),
        "multi_worker_compressed_around_replicas",
    ],
)
def test_workers_go_on_with_what_their_compression_left_out(zygote, expected, tmp_path, compressed):
    uninterrupted, backups = tmp_path / "uninterrupted", tmp_path / "backups"
    uninterrupted.mkdir()
    assert train(zygote, "", uninterrupted, training=compressed) == [0, 0]
    train(zygote, backups, tmp_path, (6, 6), compressed)
    assert train(zygote, backups, tmp_path, training=compressed) == [0, 0]
    assert_all_equal(uninterrupted, tmp_path)
    with pytest.raises(AssertionError):
        assert_all_equal(expected, tmp_path)  # compression makes a difference


@pytest.mark.timeout(200)
def test_another_number_of_workers_goes_on_from_there(zygote, expected, tmp_path):
    train(zygote, tmp_path / "backups", tmp_path, (6, 6))
    assert zygote.run("multi_worker", tmp_path / "backups", tmp_path / "0.npz", 0, "") == 0
    received = np.load(tmp_path / "0.npz")
    assert received["epochs"].tolist() == [0, 1, 2, 3]
    assert "backup is of 2 workers" in zygote.log()
    first = np.load(expected / "0.npz")["history/loss"][0]
    assert received["history/loss"][0] == first  # of the epoch that was done before


@pytest.mark.timeout(200)
def test_a_damaged_part_of_one_worker_makes_all_take_the_backup_before(zygote, expected, tmp_path):
    train(zygote, tmp_path / "backups", tmp_path, (6, 6))
    storage = Storage(tmp_path / "backups")
    newest = storage.path(storage.numbers()[-1])
    os.truncate(newest / "worker-1.safetensors", 10)
    assert train(zygote, tmp_path / "backups", tmp_path) == [0, 0]
    assert_all_equal(expected, tmp_path)


@pytest.mark.timeout(200)
def test_workers_without_a_common_backup_say_so_by_rank(zygote, tmp_path):
    train(zygote, tmp_path / "backups", tmp_path, (6, 6))
    storage = Storage(tmp_path / "backups")
    for number in storage.numbers():
        (storage.path(number) / "worker-1.json").unlink()
    assert train(zygote, tmp_path / "backups", tmp_path) == [1, 1]
    message = zygote.log()
    assert "rank 0: backup" in message and "rank 1: none" in message


# Worker 1 of the first attempt sends itself SIGKILL after six batches.
TRAIN = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.callbacks.trainings import multi_worker
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("backups:", os.path.exists("backups") and len(os.listdir("backups")), flush=True)
kill_at = 6 if rank == 1 and os.environ["TFPARALLEL_RESTART"] == "0" else 0
multi_worker("backups", f"{{rank}}.npz", str(kill_at), os.environ["TF_CONFIG"])
"""


@pytest.mark.long  # tests/launch/test_restarts.py starts jobs again, the first test above goes on
@pytest.mark.timeout(240)
def test_the_launcher_starts_a_killed_training_again(expected, tmp_path):
    options = ("--max-restarts", "1", "--grace-seconds", "1")
    with Launcher(tmp_path, TRAIN, *options) as launcher:
        stdout, stderr = launcher.process.communicate()
    assert launcher.process.returncode == 0, stderr
    assert re.search(r"backups: [34]\n", stdout)  # with the lease, and perhaps one half written
    assert "worker 1 failed first: killed by SIGKILL" in stderr
    assert "restart 1 of 1" in stderr
    assert_all_equal(expected, tmp_path)
    assert not (tmp_path / "backups").exists()
