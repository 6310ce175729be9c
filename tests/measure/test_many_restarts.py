"""Delays of known length in twelve places, over twenty restarts with kills at random moments."""

import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.jobs import ROOT
from tfparallel.measure.goodput import goodput, read_ledger

RUNS = 21
DOWN_S = 0.8
SCRIPT = Path(__file__).with_name("restarted_training.py")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_delays_land_in_their_category(tmp_path):
    for run in range(RUNS):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path), str(run)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
        time.sleep(DOWN_S)
    lines = read_ledger(tmp_path / "measure")
    found, expected = goodput(lines), known(tmp_path, lines)
    assert found.runs == RUNS
    assert found.lost_s["repeated steps"] > 0
    got = {**found.lost_s, "productive": found.productive_s + found.lost_s["repeated steps"]}
    report = {name: (round(expected[name], 2), round(got[name], 2)) for name in expected}
    print(json.dumps(report))
    off = {name: got[name] / expected[name] - 1 for name in expected}
    assert all(abs(each) < 0.05 for each in off.values()), report
    assert found.productive_s + sum(found.lost_s.values()) == pytest.approx(found.wall_s, rel=5e-3)


def known(folder, lines):
    """Seconds of each category, of what a run did before its last line; what came later is down."""
    beats = {line["run"]: line["at"] for line in lines}
    starts = {line["run"]: line["at"] for line in lines if line["kind"] == "start"}
    seconds = collections.Counter()
    for text in (folder / "delays.jsonl").read_text().splitlines():
        span = json.loads(text)
        if span["to"] <= beats[span["run"]]:
            seconds[span["category"]] += span["to"] - span["from"]
    seconds["down"] = sum(starts[run + 1] - beats[run] for run in range(RUNS - 1))
    return seconds
