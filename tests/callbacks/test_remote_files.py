"""Backups in a store without folders and renames, through fsspec."""

import os
import signal
import sys

import numpy as np
import pytest

from tests.callbacks.test_backup import Interrupt, fit
from tests.callbacks.test_storage import FILES, child_killed_after, save
from tfparallel.callbacks import BackupAndRestore, BackupError
from tfparallel.callbacks.backup.storage import InvalidBackupError, Storage

fsspec = pytest.importorskip("fsspec", reason="remote folders need fsspec")


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    yield f"{request.param}://{tmp_path}/run/backups"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def store(url):
    return fsspec.url_to_fs(url)[0]


@pytest.fixture
def storage(url):
    return Storage(url)


def put(store, path, text="mine"):
    store.pipe_file(path, text.encode())


def inside(storage, number, name):
    return fsspec.url_to_fs(storage.path(number))[1] + "/" + name


def test_reads_what_was_written(storage):
    assert storage.numbers() == []
    first, second = save(storage, b"abc"), save(storage, b"def")
    assert storage.numbers() == [first, second]
    assert storage.read(first) == dict.fromkeys(FILES, b"abc")
    storage.delete(first)
    assert storage.numbers() == [second]
    assert storage.read(second) == dict.fromkeys(FILES, b"def")


def test_what_was_begun_does_not_count_and_is_removed(storage, store):
    number = save(storage)
    begun = storage.begin()
    storage.write(begun, {FILES[0]: [b"half"]})
    assert storage.numbers() == [number]
    assert storage.begin() == begun
    assert not store.exists(inside(storage, begun.number, FILES[0]))
    storage.abandon(begun)
    assert save(storage) == begun.number


def test_a_claim_in_a_folder_is_never_read_half_written_and_never_comes_back(tmp_path):
    files = Storage(f"file://{tmp_path}/run").files
    assert files.create_claim(1, b"one")
    with open(tmp_path / "run" / "lease-00000001", "rb") as before:
        files.rewrite_claim(1, b"two")
        assert before.read() == b"two"  # it is one file, which was never empty
    files.delete_claim(1)
    with pytest.raises(FileNotFoundError):
        files.rewrite_claim(1, b"three")
    assert files.claims() == []


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_damaged_and_missing_files_are_found(storage, store, name):
    number = save(storage)
    path = inside(storage, number, name)
    put(store, path, "damaged")
    with pytest.raises(InvalidBackupError, match=name):
        storage.read(number)
    store.rm_file(path)
    with pytest.raises(InvalidBackupError, match=name):
        storage.read(number)


def test_files_of_others_are_never_deleted(storage, store):
    number = save(storage)
    notes = [inside(storage, number, "notes.txt"), inside(storage, number, "../notes.txt")]
    notes[1] = os.path.normpath(notes[1])
    for path in notes:
        put(store, path)
    storage.delete_all()
    assert storage.numbers() == []
    assert [store.cat_file(path) for path in notes] == [b"mine"] * 2
    assert save(storage) == number + 1


CALLS = ("makedirs", "pipe_file", "open", "rm_file", "rmdir", "ls")


def test_killed_before_any_call_of_a_save(tmp_path):
    """Dies by SIGKILL before the 1st, 2nd, ... request to the store, of a save and a delete."""
    storage = Storage(f"file://{tmp_path}/backups")
    save(storage, b"old")
    for num_calls in range(100):
        status = child_killed_after(storage, num_calls, storage.files._store, CALLS)
        newest = storage.numbers()[-1]
        assert set(storage.read(newest).values()) <= {b"old", b"new"}
        assert all(map(storage.read, storage.numbers()))
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert num_calls > 15
    assert storage.numbers() == [newest]
    assert os.listdir(tmp_path / "backups") == [f"backup-{newest:08d}"]


def test_a_training_goes_on_from_a_remote_backup(url, store, storage):
    expected = fit()
    with pytest.raises(KeyboardInterrupt):
        fit(BackupAndRestore(url, save_freq=1), Interrupt(4))
    assert storage.numbers()
    callback = BackupAndRestore(url, save_freq=1)
    received = fit(callback)
    assert received.history == expected.history
    pairs = zip(received.model.get_weights(), expected.model.get_weights(), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert storage.numbers() == []
    (claim,) = store.ls(url, detail=False)  # what is late must not count
    assert claim.rpartition("/")[2] == "lease-00000002"


def test_never_starts_anew_when_all_remote_backups_are_damaged(url, store, storage):
    with pytest.raises(KeyboardInterrupt):
        fit(BackupAndRestore(url, save_freq=1), Interrupt(4))
    for number in storage.numbers():
        store.rm_file(inside(storage, number, "shared.json"))
    with pytest.raises(BackupError, match="valid for all workers"):
        fit(BackupAndRestore(url))


def test_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match="pip install fsspec"):
        BackupAndRestore("gs://bucket/run")


class Unreliable:
    """A store of which so many requests that change nothing fail."""

    def __init__(self, store, failures, error=None):
        self._store, self.failures = store, failures
        self._error = error or OSError("no answer")

    def __getattr__(self, name):
        request = getattr(self._store, name)
        if name not in ("ls", "cat_file", "size"):
            return request

        def asked(*arguments, **options):
            if self.failures:
                self.failures -= 1
                raise self._error
            return request(*arguments, **options)

        return asked


@pytest.mark.parametrize("failures", [1, 4])
def test_a_store_that_does_not_answer_is_asked_again(url, store, storage, failures):
    older, newer = save(storage, b"abc"), save(storage, b"def")
    pauses_s = []
    seen = Storage(url, store=Unreliable(store, failures), sleep=pauses_s.append)
    assert seen.numbers() == [older, newer]
    assert sum(pauses_s) == pytest.approx(0.1 * (2**failures - 1))
    assert seen.read(newer) == dict.fromkeys(FILES, b"def")


def test_a_store_that_never_answers_is_an_error_and_no_empty_folder(url, store, storage):
    save(storage)
    seen = Storage(url, store=Unreliable(store, 5), sleep=lambda s: None)
    with pytest.raises(OSError, match="no answer"):
        seen.numbers()


def test_what_a_store_answers_is_not_asked_again(url, store, storage):
    save(storage)
    unreliable = Unreliable(store, 2, PermissionError("not yours"))
    with pytest.raises(PermissionError):
        Storage(url, store=unreliable).numbers()
    assert unreliable.failures == 1
