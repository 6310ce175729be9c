"""`tfparallel selftest` whole, on logical CPUs."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfparallel.selftest.catalogue import CHECKS, FIRST, why_not


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("check", "said"),  # a new process, a fork, and a job of forks, which have one device each
    [("devices", ""), ("steady", ""), ("compression", "num_replicas=2, worker=0 of 2")],
)
def test_who_is_told_to_end_leaves_nothing_behind(tmp_path, check, said):
    """By `timeout`, or a job's end: its checks hold GPUs, and are in sessions of their own."""
    own_folder = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tfparallel", "selftest", "--gpus", "0", "--only", check]
    selftest = subprocess.Popen(command, env=own_folder, stderr=subprocess.PIPE, text=True)
    while not _begun(tmp_path, check, said) and selftest.poll() is None:
        time.sleep(0.1)
    selftest.terminate()
    _, told = selftest.communicate()
    assert selftest.returncode == 130 and "stopped" in told
    while _processes_of(tmp_path):  # of multiprocessing, which see that it has ended
        time.sleep(0.1)
    assert not list(tmp_path.iterdir())


def _begun(folder: Path, check: str, said: str) -> bool:
    """Whether a check has begun, and come to say something."""
    return any(said in path.read_text() for path in folder.glob(f"*/*{check}*.txt"))


def _processes_of(folder: Path) -> set[str]:
    """Ids of the processes whose temporary folder is there."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes():
                found.add(process.name)
    return found


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_this_machine_passes(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tfparallel", "selftest", "--gpus", "0", "--json", report]
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ), check=False, timeout=3500
    )
    assert done.returncode == 0, done.stdout
    verdicts = {o["check"]: o["verdict"] for o in json.loads(report.read_text())["outcomes"]}
    assert verdicts.pop("exact: horovod") in ("ok", "skipped")
    skipped = {name for name, verdict in verdicts.items() if verdict == "skipped"}
    assert skipped == {check.name for check in (*FIRST, *CHECKS) if why_not(check, num_gpus=0)}
