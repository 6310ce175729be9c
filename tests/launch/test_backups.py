"""`tfparallel backups`: what it prints and returns for whole, damaged and missing backups."""

import os
import subprocess
import sys

import pytest

from tests.callbacks.test_backup import Interrupt, fit
from tests.launch.jobs import ROOT
from tfparallel.callbacks import BackupAndRestore
from tfparallel.callbacks.backup.storage import Storage
from tfparallel.launch.cli import main


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "backups"
    with pytest.raises(KeyboardInterrupt):
        fit(BackupAndRestore(folder, save_freq=1), Interrupt(4))
    return folder


@pytest.fixture
def storage(made, tmp_path):
    """Two backups, of batches 2 and 3 of the first epoch."""
    subprocess.run(["cp", "-r", made, tmp_path / "backups"], check=True)
    return Storage(tmp_path / "backups")


@pytest.fixture
def backups(storage, capsys):
    """Runs `tfparallel backups` on the folder; returns its status and output."""

    def run(action, *options, folder=storage.root):
        status = main(["backups", action, str(folder), *options])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def rows(output):
    """The cells of a table's lines."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def damage(storage, name, number=None):
    os.truncate(storage.path(number or storage.numbers()[-1]) / name, 10)


def test_lists_epoch_and_batch_of_each(backups, storage):
    status, output = backups("list")
    numbers = [str(number) for number in storage.numbers()]
    assert status == 0
    assert [row[0] for row in rows(output)] == numbers
    assert rows(output)[-1][1:4] == ["valid", "0", "3"]


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_damaged_manifest_is_named(backups, storage, action):
    damage(storage, "manifest.json", storage.numbers()[0])
    status, output = backups(action)
    assert status == 1
    assert f"backup-{storage.numbers()[0]:08d}/manifest.json is damaged" in output
    assert [row[1] for row in rows(output)] == ["INVALID", "valid"]


def test_verify_says_that_all_is_whole(backups):
    status, output = backups("verify")
    assert (status, [row[1] for row in rows(output)]) == (0, ["valid", "valid"])


@pytest.mark.parametrize("name", ["shared.json", "shared.safetensors", "worker-0.safetensors"])
def test_verify_finds_what_list_cannot(backups, storage, name):
    damage(storage, name)
    assert backups("list")[0] == 0
    status, output = backups("verify")
    assert status == 1
    assert f"{name} must have" in output


def test_verify_finds_a_part_that_no_manifest_speaks_of(backups, storage):
    """A folder put together by hand: hashes right, a worker missing."""
    files = {name: [content] for name, content in storage.read(storage.numbers()[-1]).items()}
    draft = storage.begin()
    about = {**storage.manifest(storage.numbers()[-1]).about, "num_workers": 2}
    storage.commit(draft, storage.write(draft, files), about)
    status, output = backups("verify")
    assert status == 1
    assert "worker-1.json is not a file of this backup" in output


def test_show_prints_all_that_the_newest_holds(backups):
    status, output = backups("show")
    assert status == 0
    for expected in ("worker-0.safetensors", "float32", "[6, 4]", "History-0", "/iteration"):
        assert expected in output, expected


def test_show_takes_a_number(backups, storage):
    first = str(storage.numbers()[0])
    status, output = backups("show", "--number", first)
    assert status == 0 and rows(output)[1][:2] == ["batch", "2"]
    status, output = backups("show", "--number", "99")
    assert status == 2 and "Received: 99" in output


def test_show_refuses_a_damaged_one(backups, storage):
    damage(storage, "worker-0.json")
    status, output = backups("show")
    assert status == 1 and "worker-0.json must have" in output


@pytest.mark.parametrize("action", ["list", "verify", "show"])
def test_no_backups_is_no_success(backups, tmp_path, action):
    status, output = backups(action, folder=tmp_path / "nothing")
    assert status == 2 and "Received: none" in output


def test_reads_without_tensorflow(storage):
    source = f"""
import sys
from tfparallel.launch.cli import main
assert not {{"numpy", "rich"}} & set(sys.modules)
for action in ("list", "verify", "show"):
    assert main(["backups", action, {str(storage.root)!r}]) == 0
assert not {{"tensorflow", "keras"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", source], check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
