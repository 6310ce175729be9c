"""Workers save their shards, and restore them: as many workers, or others."""

import os
import tracemalloc

import numpy as np
import pytest

from tests.callbacks.test_schema import parts as small_parts
from tests.callbacks.zygote import Zygote
from tests.multi_process.pool import cluster_environments
from tfparallel.callbacks.backup.part import BackupPart, read_part
from tfparallel.callbacks.backup.saved_shards import read_shards
from tfparallel.callbacks.backup.storage import InvalidBackupError, Storage

pytestmark = pytest.mark.turns

KERNEL = np.arange(11, dtype="float32")


def bounds(size: int, num_workers: int) -> list[int]:
    length = -(-size // num_workers)
    return [min(rank * length, size) for rank in range(num_workers + 1)]


def save(storage: Storage, num_workers: int, cut=None, change=lambda rank, numbers: numbers) -> int:
    """A backup of a kernel `[11]` and of a number that all have."""
    own = bounds(KERNEL.size, num_workers)
    cut = {"shape": [KERNEL.size], "dtype": "float32", "bounds": own} | (cut or {})
    parts = small_parts()
    shared, worker = parts["shared"], parts["worker-0"]
    shared["num_workers"] = num_workers
    model = {"paths": ["scale", "kernel"], "arrays": [np.ones(()), None], "cut": {"1": cut}}
    shared["model"] = model
    files = shared.files("shared")
    for rank in range(num_workers):
        files |= worker.files(f"worker-{rank}")
        shard = BackupPart()
        shard["numbers"] = change(rank, {"1": KERNEL[own[rank] : own[rank + 1]]})
        files |= shard.files(f"shards-{rank}")
    draft = storage.begin()
    storage.commit(draft, storage.write(draft, files), {"num_workers": num_workers})
    return draft.number


def restored(storage: Storage, number: int, begin: int, end: int) -> np.ndarray:
    model = read_part(storage, number, "shared")["model"]
    return read_shards(storage, number, model, lambda position, size: (begin, end))[1]


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("restored_by", [1, 2, 3, 5, 12])
def test_any_number_of_workers_restores_what_is_its_own(tmp_path, saved_by, restored_by):
    storage = Storage(tmp_path)
    number = save(storage, saved_by)
    own = bounds(KERNEL.size, restored_by)
    for begin, end in zip(own, own[1:], strict=False):
        np.testing.assert_array_equal(restored(storage, number, begin, end), KERNEL[begin:end])


def test_a_worker_reads_the_files_that_have_something_for_it(tmp_path):
    storage = Storage(tmp_path)
    number = save(storage, 4)
    os.truncate(storage.path(number) / "shards-3.safetensors", 5)
    np.testing.assert_array_equal(restored(storage, number, 2, 9), KERNEL[2:9])
    with pytest.raises(InvalidBackupError, match="shards-3"):
        restored(storage, number, 2, 10)


@pytest.mark.parametrize(
    "change",
    [
        lambda rank, numbers: {},
        lambda rank, numbers: {"1": numbers["1"][:-1]},
        lambda rank, numbers: {"1": numbers["1"].astype("float64")},
        lambda rank, numbers: {"1": [1.0]},
        lambda rank, numbers: {"1": numbers["1"][np.newaxis]},
    ],
)
def test_refuses_shards_that_are_not_what_the_shared_part_says(tmp_path, change):
    storage = Storage(tmp_path)
    number = save(storage, 2, change=lambda rank, own: change(rank, own) if rank else own)
    with pytest.raises(InvalidBackupError, match="shards-1 in .* cannot be restored"):
        restored(storage, number, 0, KERNEL.size)


@pytest.mark.parametrize(
    "cut",
    [
        {"bounds": [0, 6]},
        {"bounds": [0, 7, 6, 11]},
        {"bounds": [0, 4, 8, 11]},
        {"bounds": [1, 6, 11]},
        {"bounds": [0, 6, 12]},
        {"bounds": []},
        {"shape": [2**40, 2**40]},
        {"dtype": "object"},
    ],
)
def test_refuses_cuts_that_are_none(tmp_path, cut):
    storage = Storage(tmp_path)
    number = save(storage, 2, cut)
    with pytest.raises(InvalidBackupError, match="shared in .* cannot be restored"):
        read_part(storage, number, "shared")


def test_nobody_has_more_at_a_time_than_its_own_and_the_file_of_one_worker(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.callbacks.test_saved_shards.KERNEL", np.ones(1 << 20, "float32"))
    whole, storage = 4 << 20, Storage(tmp_path)
    number = save(storage, 8)
    tracemalloc.start()
    try:
        own = restored(storage, number, 0, 1 << 18)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert own.nbytes == whole / 4
    # Its own, in pieces that are joined; a file as bytes, and as the arrays in it.
    assert peak < 2 * own.nbytes + 2.2 * whole / 8


def test_versions_that_cannot_join_shards_find_another_format(tmp_path):
    storage = Storage(tmp_path)
    number = save(storage, 2)
    assert '"format": 2' in (storage.path(number) / "manifest.json").read_text()


@pytest.fixture(scope="module")
def zygote():
    started = Zygote()
    yield started
    started.close()


def train(
    zygote, backups, folder, num_workers, kill_at=0, training="sharded_workers_without_noise"
):
    """The statuses of so many workers; rank 0 is killed after `kill_at` batches."""
    folder.mkdir(exist_ok=True)
    tasks = [each["TF_CONFIG"] for each in cluster_environments(num_workers)] or ["{}"]
    calls = [
        (backups, folder / f"{rank}.npz", 0 if rank else kill_at, task)
        for rank, task in enumerate(tasks)
    ]
    return zygote.run_together(training, calls)


def assert_same_end(expected, received):
    """History, weights and slots."""
    expected, received = np.load(expected / "0.npz"), np.load(received / "0.npz")
    compared = [k for k in expected if k.startswith(("weights", "optimizer", "history"))]
    assert len(compared) > 10
    for name in compared:
        np.testing.assert_allclose(received[name], expected[name], rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lives", [[2], pytest.param([3, 2], marks=pytest.mark.long)], ids=str)
def test_killed_workers_go_on_as_others_and_at_last_as_one(zygote, tmp_path, lives):
    backups = tmp_path / "backups"
    assert train(zygote, "", tmp_path / "expected", 0) == [0]
    for num_workers in lives:
        assert -9 in train(zygote, backups, tmp_path / "killed", num_workers, kill_at=5)
        newest = Storage(backups).path(Storage(backups).numbers()[-1])
        saved = {name for name in os.listdir(newest) if name.endswith(".safetensors")}
        assert {f"shards-{rank}.safetensors" for rank in range(num_workers)} <= saved
    assert train(zygote, backups, tmp_path / "one", 0) == [0]
    assert_same_end(tmp_path / "expected", tmp_path / "one")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_of_two_copies_the_first_is_saved_and_both_are_restored(zygote, tmp_path):
    """Four workers, of which two share a copy, go on as four, and their backup as one."""
    backups, training = tmp_path / "backups", "sharded_workers_in_two_copies"
    assert train(zygote, "", tmp_path / "expected", 0) == [0]
    assert -9 in train(zygote, backups, tmp_path / "killed", 4, kill_at=5, training=training)
    newest = Storage(backups).path(Storage(backups).numbers()[-1])
    saved = {name for name in os.listdir(newest) if name.startswith("shards")}
    assert saved == {f"shards-{k}.{kind}" for k in range(2) for kind in ("json", "safetensors")}
    assert train(zygote, backups, tmp_path / "four", 4, training=training) == [0] * 4
    assert_same_end(tmp_path / "expected", tmp_path / "four")
    assert train(zygote, backups, tmp_path / "one", 0) == [0]
    assert_same_end(tmp_path / "expected", tmp_path / "one")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_damaged_shard_of_one_worker_makes_all_take_the_backup_before(zygote, tmp_path):
    backups = tmp_path / "backups"
    assert train(zygote, "", tmp_path / "expected", 0) == [0]
    train(zygote, backups, tmp_path / "killed", 2, kill_at=6)
    storage = Storage(backups)
    newest = storage.path(storage.numbers()[-1])
    with open(newest / "shards-1.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert train(zygote, backups, tmp_path / "two", 2) == [0, 0]
    assert "Backup left out" in zygote.log() and "shards-1.safetensors" in zygote.log()
    assert_same_end(tmp_path / "expected", tmp_path / "two")
