"""`tfparallel launch --max-restarts`: what is started again, how often, after which pause."""

import itertools
import re
import signal
import time

import psutil
import pytest

from tests.launch.jobs import SLEEP, Launcher, is_alive
from tfparallel.launch.job_life import Ending
from tfparallel.launch.restarts import next_pause_s, run_with_restarts

pytestmark = pytest.mark.timeout(120)


# ---- the decisions


class Job:
    """Ends as told, attempt by attempt; records pauses and notes."""

    def __init__(self, *endings, stop_signal=None, ran_s=0.0):
        self._endings, self._stop_signal, self._ran_s = iter(endings), stop_signal, ran_s
        self.attempts, self.pauses, self.notes = [], [], []

    def run(self, restart):
        self.attempts.append(restart)
        return next(self._endings)

    def wait(self, pause_s):
        self.pauses.append(pause_s)
        return self._stop_signal

    def status(self, max_restarts):
        ticks = itertools.count(0, self._ran_s)
        return run_with_restarts(
            self.run, max_restarts, self.notes.append, wait=self.wait, clock=lambda: next(ticks)
        )


def failed(status, rank=0):
    return Ending(status, rank)


def test_success_is_the_end():
    job = Job(Ending(0))
    assert (job.status(3), job.attempts, job.notes) == (0, [0], [])


@pytest.mark.parametrize("status", [1, 137, 143])
def test_a_failure_is_started_again_until_it_succeeds(status):
    job = Job(failed(status), failed(status, 1), Ending(0))
    assert (job.status(5), job.attempts, job.pauses) == (0, [0, 1, 2], [1, 2])
    assert job.notes == ["restart 1 of 5 in 1 s", "restart 2 of 5 in 2 s"]


def test_no_more_often_than_told():
    job = Job(failed(1), failed(1), failed(9))
    assert (job.status(2), job.attempts) == (9, [0, 1, 2])
    assert job.notes[-1] == "not started again: all 2 restarts are used"


def test_without_restarts_nothing_is_said():
    job = Job(failed(1))
    assert (job.status(0), job.attempts, job.notes) == (1, [0], [])


@pytest.mark.parametrize("status", [2, 126, 127])
def test_a_program_that_was_called_wrongly_is_not_started_again(status):
    job = Job(failed(status))
    assert (job.status(5), job.attempts) == (status, [0])
    assert f"exit status {status} would come again" in job.notes[0]


def test_a_launcher_that_was_told_to_stop_stops():
    job = Job(Ending(143))
    assert (job.status(5), job.attempts) == (143, [0])


def test_a_signal_in_the_pause_stops():
    job = Job(failed(1), stop_signal=signal.SIGTERM)
    assert (job.status(5), job.attempts) == (143, [0])


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_long_run():
    pauses = list(itertools.accumulate(range(8), lambda p, _: next_pause_s(p, 0.1), initial=0))
    assert pauses[1:] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert next_pause_s(32, 61) == 1
    job = Job(failed(1), failed(1), failed(1), Ending(0), ran_s=100.0)
    assert (job.status(5), job.pauses) == (0, [1, 1, 1])


# ---- real processes


def test_kill_9_of_a_worker_starts_all_of_them_again(tmp_path):
    source = """
        import os, time
        print("pids", os.getpid(), flush=True)
        while not os.path.exists("may_end"): time.sleep(0.1)
    """
    with Launcher(tmp_path, source, "--max-restarts", "2") as launcher:
        first = list(launcher.wait_for_members())
        first[1].kill()
        second = launcher.wait_for_members()[2:]
        (tmp_path / "may_end").touch()
        _, stderr = launcher.process.communicate()
    assert launcher.process.returncode == 0
    assert len(second) == 2 and not {p.pid for p in first} & {p.pid for p in second}
    assert not [p for p in first if is_alive(p)]
    assert re.search(r"failed first: killed by SIGKILL(.|\n)*\[launcher\] restart 1 of 2", stderr)


def test_every_attempt_has_ports_of_its_own(tmp_path):
    source = """
        import os, sys
        print("config", os.environ["TF_CONFIG"], flush=True)
        sys.exit(0 if os.environ["TFPARALLEL_RESTART"] == "1" else 143)
    """
    with Launcher(tmp_path, source, "--max-restarts", "1", workers=1) as launcher:
        stdout, _ = launcher.process.communicate()
    assert launcher.process.returncode == 0
    assert len(set(re.findall(r"127.0.0.1:\d+", stdout))) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_is_no_reason_to_restart(tmp_path, number):
    source = 'import os, time\nprint("pids", os.getpid(), flush=True)' + SLEEP
    with Launcher(tmp_path, source, "--max-restarts", "5") as launcher:
        launcher.wait_for_members()
        launcher.signal(number)
        _, stderr = launcher.process.communicate()
    assert launcher.process.returncode == 128 + number
    assert "restart" not in stderr


def test_a_signal_between_two_attempts_stops_the_launcher(tmp_path):
    with Launcher(tmp_path, "raise SystemExit(1)", "--max-restarts", "9", workers=1) as launcher:
        for line in launcher.process.stderr:
            if "restart 2 of 9 in 2 s" in line:
                break
        time.sleep(0.5)
        launcher.signal(signal.SIGTERM)
        stdout, stderr = launcher.process.communicate()
    assert launcher.process.returncode == 143
    assert "told to stop" in stderr
    assert not psutil.pid_exists(launcher.process.pid)


def test_a_wrong_number_is_refused(tmp_path):
    with Launcher(tmp_path, "pass", "--max-restarts=-1") as launcher:
        _, stderr = launcher.process.communicate()
    assert launcher.process.returncode == 2
    assert "expected an integer from 0 to 1000000. Received: '-1'" in stderr
