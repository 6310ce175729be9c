import errno
import os
import signal
import stat
from collections.abc import Iterable
from typing import Any

import pytest

from tfparallel.callbacks.backup.backup_names import swept
from tfparallel.callbacks.backup.commit import delete_old
from tfparallel.callbacks.backup.storage import InvalidBackupError, Storage

ABOUT = {"tfparallel": "1", "num_workers": 1}
FILES = ("shared.json", "shared.safetensors")


def save(storage: Storage, content: bytes = b"state" * 100) -> int:
    draft = storage.begin()
    storage.commit(draft, storage.write(draft, {name: [content] for name in FILES}), ABOUT)
    return draft.number


@pytest.fixture
def storage(tmp_path):
    return Storage(tmp_path / "backups")


def test_reads_what_was_written(storage):
    number = save(storage, b"abc")
    assert storage.numbers() == [number]
    assert storage.manifest(number).about == ABOUT
    assert storage.read(number) == dict.fromkeys(FILES, b"abc")


def test_folders_are_private(storage):
    number = save(storage)
    for folder in (storage.root, storage.path(number)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_every_flipped_bit_is_found(storage, name):
    number = save(storage)
    path = storage.path(number) / name
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.raises(InvalidBackupError, match=name):
            storage.read(number)
    path.write_bytes(whole)
    storage.read(number)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_truncated_and_missing_files_are_found(storage, name):
    number = save(storage)
    path = storage.path(number) / name
    for length in (path.stat().st_size - 1, 1, 0):
        os.truncate(path, length)
        with pytest.raises(InvalidBackupError, match=name):
            storage.read(number)
    path.unlink()
    with pytest.raises(InvalidBackupError, match=name):
        storage.read(number)


def test_refuses_symbolic_links(storage, tmp_path):
    number = save(storage)
    for path in (storage.path(number) / FILES[0], storage.path(number)):
        moved = tmp_path / "elsewhere"
        path.rename(moved)
        path.symlink_to(moved)
        with pytest.raises(InvalidBackupError, match="symbolic link"):
            storage.read(number)
        path.unlink()
        moved.rename(path)


def test_refuses_a_backup_of_another_format(storage, monkeypatch):
    monkeypatch.setattr("tfparallel.callbacks.backup.storage.FORMAT", 3)
    number = save(storage)
    monkeypatch.undo()
    with pytest.raises(InvalidBackupError, match="must have format 1 or 2. Received: format 3"):
        storage.read(number)


def test_files_of_others_are_never_deleted(storage):
    number = save(storage)
    (storage.root / "notes.txt").write_text("mine")
    (storage.path(number) / "notes.txt").write_text("mine")
    storage.delete_all()
    left = sorted(str(p.relative_to(storage.root)) for p in storage.root.rglob("*.txt"))
    assert left == [f"deleting-{number:08d}/notes.txt", "notes.txt"]
    assert save(storage) == number + 1  # and the folder that is left is not in the way


def test_a_link_in_place_of_a_leftover_is_not_followed(storage, tmp_path):
    save(storage)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shared.json").write_text("mine")
    storage.path(9, "writing").symlink_to(tmp_path / "elsewhere")
    save(storage)
    assert (tmp_path / "elsewhere" / "shared.json").exists()


@pytest.mark.parametrize(
    "name", ["backup-000000001", "backup-٠٠٠٠٠٠٠٥", "backup-5", "backup-" + "9" * 30]
)
def test_names_that_we_do_not_give_are_of_others(storage, name):
    save(storage)
    (storage.root / name).mkdir()
    assert storage.numbers() == [1]
    assert save(storage) == 2
    storage.delete_all()
    assert os.listdir(storage.root) == [name]


@pytest.mark.parametrize("kind", ["backup", "writing", "deleting"])
def test_a_file_in_place_of_a_folder_is_of_others(storage, kind):
    save(storage)
    storage.path(2, kind).write_text("mine")
    assert save(storage) == 3
    assert storage.numbers() == [1, 3]
    storage.delete_all()
    assert storage.path(2, kind).read_text() == "mine"


def test_damaged_backups_do_not_push_whole_ones_out(storage):
    for _ in range(3):
        number = save(storage)
        (storage.path(number) / "manifest.json").unlink()
    whole = save(storage)
    storage.path(whole + 1).mkdir()  # an empty one, newer
    delete_old(storage, keep=2)
    assert storage.numbers() == [1, 2, 3, whole, whole + 1]
    newest = [save(storage), save(storage)]
    delete_old(storage, keep=2)
    assert storage.numbers() == newest


CALLS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir", "listdir")


def test_killed_before_any_call_of_a_save(storage):
    """Dies by SIGKILL before the 1st, 2nd, ... call to the file system of a save and a delete."""
    save(storage, b"old")
    for num_calls in range(100):
        if child_killed_after(storage, num_calls, os, CALLS) == 0:
            break
        newest = storage.numbers()[-1]
        assert set(storage.read(newest).values()) <= {b"old", b"new"}
        assert storage.numbers()[0] <= newest
    else:
        raise AssertionError("The child never finished.")
    assert num_calls > 20
    assert storage.numbers() == [storage.numbers()[-1]]


def child_killed_after(storage: Storage, num_calls: int, target: Any, names: Iterable[str]) -> int:
    """Saves in a fork that dies before call `num_calls` of what `target` has under `names`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = iter(range(num_calls))

    def counted(original):
        def call(*args, **kwargs):
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in names:
        setattr(target, name, counted(getattr(target, name)))
    newest = save(storage, b"new")
    for number in storage.numbers():
        if number < newest:
            storage.delete(number)
    os._exit(0)


def test_a_full_disk_leaves_the_backup_before(storage, small_disk):
    storage = Storage(small_disk / "backups")
    number = save(storage)
    with pytest.raises(OSError) as raised:
        save(storage, bytes(4 << 20))
    assert raised.value.errno == errno.ENOSPC
    assert storage.numbers() == [number]
    storage.read(number)
    assert save(storage) == number + 1  # the leftover is removed, its space is free again


def test_a_folder_without_permission():
    storage = Storage("/proc/backups")  # nobody can write there, not even root
    with pytest.raises(OSError):
        storage.begin()


def test_who_sweeps_leaves_what_newer_owners_have_begun():
    """`swept`, as a table: what an owner with number 3 removes."""
    mine, other = "a" * 16, "b" * 16
    cases = {
        f"writing-00000007-{other}-2": True,
        f"writing-00000007-{other}-4": False,
        f"writing-00000007-{other}-3": False,  # of a folder that was removed, and counts anew
        f"writing-00000007-{mine}-3": True,
        f"writing-00000007-{other}": True,  # of an earlier version
        "writing-00000007": True,
        f"backup-00000007-{other}-2": False,
        f"writing-00000007-{other}-02": False,
    }
    for name, is_swept in cases.items():
        names = ["lease-00000003", name]
        assert [d.name("writing") for d in swept(names, mine, 3)] == [name] * is_swept
    without_claim = [*cases]
    assert [d.token for d in swept(without_claim, mine, 3)] == [mine]
    assert len(swept(without_claim, "", 0)) == 6
