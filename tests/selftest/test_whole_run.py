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
@pytest.mark.parametrize("check", ["devices", "steady", "compression"])  # new, a fork, forks
def test_who_is_told_to_end_leaves_nothing_behind(tmp_path, check):
    """By `timeout`, or a job's end: its checks hold GPUs, and are in sessions of their own."""
    own_folder = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tfparallel", "selftest", "--gpus", "0", "--only", check]
    selftest = subprocess.Popen(command, env=own_folder, stderr=subprocess.PIPE, text=True)
    while not (begun := list(tmp_path.glob(f"*/*{check}*.txt"))) and selftest.poll() is None:
        time.sleep(0.1)
    selftest.terminate()
    _, said = selftest.communicate()
    assert begun and selftest.returncode == 130 and "stopped" in said
    while _processes_of(tmp_path):  # of multiprocessing, which see that it has ended
        time.sleep(0.1)
    assert not list(tmp_path.iterdir())


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
