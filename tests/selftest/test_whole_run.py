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
def test_who_is_told_to_end_leaves_nothing_behind(tmp_path):
    """By `timeout`, or a job's end: its checks hold GPUs, and are in sessions of their own."""
    own_folder = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tfparallel", "selftest", "--gpus", "0", "--only", "devices"]
    selftest = subprocess.Popen(command, env=own_folder, stderr=subprocess.PIPE, text=True)
    while not (checks := _checks_in(tmp_path)) and selftest.poll() is None:
        time.sleep(0.1)
    selftest.terminate()
    _, said = selftest.communicate()
    assert checks and selftest.returncode == 130 and "stopped" in said
    assert not _checks_in(tmp_path) and not list(tmp_path.iterdir())


def _checks_in(folder: Path) -> list[Path]:
    """Processes that check something in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = process.read_bytes()
            if b"one_check" in words and os.fsencode(folder) in words:
                found.append(process.parent)
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
