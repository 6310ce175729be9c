"""The ledger's arithmetic on written lines, and a job that is killed for real."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.jobs import ROOT
from tests.multi_process.forking import forked
from tfparallel.measure.goodput import FILE, LOST, Ledger, goodput, read_ledger

pytestmark = pytest.mark.turns


def start(run, at):
    return {"run": run, "kind": "start", "at": at}


def beat(run, at, step, **seconds):
    return {"run": run, "kind": "beat", "at": at, "step": step, "seconds": seconds}


def test_one_run():
    found = goodput([start(0, 100.0), beat(0, 110.0, 0), beat(0, 120.0, 8, compute=6.0, input=1.5)])
    assert (found.wall_s, found.productive_s, found.runs, found.steps) == (20.0, 6.0, 1, 8)
    assert found.lost_s["input"] == 1.5
    assert found.lost_s["start"] == 20 - 7.5
    assert found.share == 0.3


def test_steps_of_a_millisecond_count():
    """All of them, as what is added up are seconds: no step is too short."""
    found = goodput([start(0, 0.0), beat(0, 1.0, 0), beat(0, 2.0, 900, compute=0.9)])
    assert (found.steps, found.productive_s) == (900, 0.9)


def test_steps_that_are_done_again_were_in_vain():
    """Killed at step 10, resumed at 4; the time of 4 to 10 in the first run does not count."""
    lines = [
        start(0, 0.0),
        beat(0, 2.0, 0),
        beat(0, 12.0, 10, compute=10.0),
        start(1, 15.0),
        beat(1, 16.0, 4, restoring=0.5),
        beat(1, 26.0, 14, restoring=0.5, compute=10.0),
    ]
    found = goodput(lines)
    assert found.lost_s["repeated steps"] == pytest.approx(6.0)
    assert found.productive_s == pytest.approx(14.0)
    assert found.lost_s["down"] == 3.0
    assert found.lost_s["restoring"] == 0.5
    assert found.productive_s + sum(found.lost_s.values()) == pytest.approx(found.wall_s)


def test_what_the_start_waits_for_others_has_a_name_of_its_own():
    lines = [start(0, 0.0), beat(0, 9.0, 0, **{"waiting for workers": 6.0})]
    lines += [beat(0, 10.0, 1, **{"waiting for workers": 6.0, "compute": 1.0})]
    found = goodput(lines)
    assert found.lost_s["waiting for workers"] == 6.0
    assert found.lost_s["start"] == 3.0
    assert "waiting for workers 6.0 s" in str(found)


def test_a_run_that_never_came_to_a_step():
    found = goodput([start(0, 0.0), start(1, 5.0), beat(1, 9.0, 0), beat(1, 10.0, 1, compute=1.0)])
    assert found.lost_s["down"] == 5.0
    assert found.productive_s + sum(found.lost_s.values()) == pytest.approx(10.0)


def test_half_a_line_is_left_out(tmp_path):
    ledger = Ledger(tmp_path, time.time())
    ledger.write(1, {"compute": 1.0})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"run": 0, "kind": "be')
    assert [line["kind"] for line in read_ledger(tmp_path)] == ["start", "beat"]
    with (tmp_path / FILE).open("a") as file:
        file.write("\n")
    assert Ledger(tmp_path, time.time()) and read_ledger(tmp_path)[-1]["run"] == 1


def test_the_start_of_a_process_is_not_before_it():
    code = "from tfparallel.measure.goodput import process_started_at as at; print(at())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before_s = time.time()
    told = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert before_s - 0.1 <= float(told) <= time.time()


@pytest.mark.timeout(300)
def test_a_job_that_is_killed(tmp_path):
    """Twice by SIGKILL, then it ends: delays land under their names, all sums to the wall time."""
    began = []
    pause_s, down_s, unwritten_s = 0.25, 1.5, 1.0
    for kill_at in (9, 14, 99):
        log = tmp_path / f"{kill_at}.log"
        arguments = [str(tmp_path), str(kill_at), str(pause_s)]
        done = forked("tests.measure.killed_training", arguments, {}, log)
        began.append(time.time())  # now: before the first fork, TensorFlow is imported for all
        status = done.wait(timeout_s=120)
        assert status == (0 if kill_at == 99 else -signal.SIGKILL), log.read_text()
        if kill_at != 99:
            time.sleep(down_s)
    job_s = float((tmp_path / "ended").read_text()) - began[0]  # without what comes after it
    found = goodput(read_ledger(tmp_path / "measure"))
    assert found.runs == 3 and found.steps == 20
    assert found.wall_s == pytest.approx(job_s, abs=1.0)
    assert found.productive_s + sum(found.lost_s.values()) == pytest.approx(found.wall_s, rel=5e-3)
    assert set(found.lost_s) == set(LOST)
    # 10, 7 and 8 steps: killed in step 9 and 14, resumed at 8 and 12. What a run did after its
    # last line, of which there is one each second, is lost with it.
    slept_s = (10 + 7 + 8) * pause_s
    assert slept_s - 2 * (unwritten_s + pause_s) <= found.lost_s["host"] <= slept_s + 3.0
    assert found.lost_s["down"] >= 2 * down_s
    assert found.lost_s["restoring"] > 0
    assert "goodput" in log.read_text() and "3 runs" in log.read_text()
