"""`tfparallel selftest` whole, on logical CPUs."""

import json
import os
import subprocess
import sys

import pytest


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
    on_gpus = {"kernels", "integers", "nccl", "copies", "launch ahead", "memory", "speed"}
    assert skipped == {"topology", *on_gpus}
