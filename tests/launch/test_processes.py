"""Real processes and real signals; nothing here imports TensorFlow in a worker."""

import io
import os
import re
import signal
import subprocess
import threading
import time

import psutil
import pytest

from tests.launch.jobs import FAMILY, SLEEP, Launcher, is_alive, python_command, survivors
from tfparallel.launch.processes import WorkerCommand, run_processes

pytestmark = [pytest.mark.timeout(60), pytest.mark.turns]


def run(*sources, grace_s=5.0, **variables):
    """Run one worker per source; return status, standard output and standard error."""
    stdout, stderr = io.BytesIO(), io.BytesIO()
    commands = [python_command(f"worker {i}", s, **variables) for i, s in enumerate(sources)]
    status = run_processes(commands, grace_s=grace_s, stdout=stdout, stderr=stderr)
    return status, stdout.getvalue().decode(), stderr.getvalue().decode()


def pids_in(output):
    return [int(pid) for pids in re.findall(r"pids ([\d ]+)", output) for pid in pids.split()]


def processes_with(pids):
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


# ---- output


def test_returns_zero_when_all_succeed():
    assert run("pass", "pass") == (0, "", "")


def test_each_worker_has_its_own_environment():
    commands = [python_command(f"worker {i}", "import os; print(os.environ['X'])", X=f"x{i}")
                for i in range(2)]  # fmt: skip
    stdout = io.BytesIO()
    assert run_processes(commands, stdout=stdout, stderr=io.BytesIO()) == 0
    assert sorted(stdout.getvalue().splitlines()) == [b"[worker 0] x0", b"[worker 1] x1"]


def test_labels_every_line_and_keeps_the_streams_apart():
    source = "import sys; print('a\\n\\nb'); print('c', file=sys.stderr)"
    status, stdout, stderr = run(source)
    assert (status, stdout, stderr) == (0, "[worker 0] a\n[worker 0] \n[worker 0] b\n",
                                        "[worker 0] c\n")  # fmt: skip


def test_lines_of_different_workers_do_not_interleave():
    # Each line is written in two halves, so that a relay without line buffering would mix them.
    source = """
        import os
        name = os.environ["NAME"].encode() * 100
        for i in range(300):
            for half in (name, name + b"\\n"):
                os.write(1 + i % 2, half)
    """
    commands = [python_command(f"worker {n}", source, NAME=n) for n in "abcd"]
    both = io.BytesIO()
    assert run_processes(commands, stdout=both, stderr=both) == 0
    lines = both.getvalue().decode().splitlines()
    assert len(lines) == 4 * 300
    assert set(lines) == {f"[worker {n}] {n * 200}" for n in "abcd"}


def test_flushes_a_last_line_without_line_end():
    source = "import sys; sys.stdout.write('out'); sys.stderr.write('err')"
    assert run(source) == (0, "[worker 0] out\n", "[worker 0] err\n")


def test_passes_on_bytes_that_are_not_text():
    stdout = io.BytesIO()
    command = python_command("w", "import os; os.write(1, b'\\xff\\r\\n')")
    run_processes([command], stdout=stdout, stderr=io.BytesIO())
    assert stdout.getvalue() == b"[w] \xff\r\n"


def test_output_without_line_ends_is_passed_on_in_pieces():
    _, stdout, _ = run("print('x' * 3_000_000, end='')")
    lines = stdout.splitlines()
    assert len(lines) > 1
    assert sum(line.count("x") for line in lines) == 3_000_000


def test_a_slow_reader_gets_everything():
    class SlowStream(io.BytesIO):
        def write(self, data):
            time.sleep(0.002)
            return super().write(data[:1000])  # as a pipe does

    stdout = SlowStream()
    command = python_command("w", "for i in range(20_000): print(i)")
    assert run_processes([command], stdout=stdout, stderr=io.BytesIO()) == 0
    assert stdout.getvalue() == b"".join(b"[w] %d\n" % i for i in range(20_000))


def test_a_closed_reader_does_not_stop_the_job(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = tmp_path / "done"
    source = f"for i in range(50_000): print(i)\nopen({str(done)!r}, 'w')"
    with io.FileIO(write_end, "w") as stdout:
        command = python_command("w", source)
        assert run_processes([command], stdout=stdout, stderr=io.BytesIO()) == 0
    assert done.exists()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_labels_are_coloured_on_a_terminal_only(is_terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    read_end, write_end = os.openpty() if is_terminal else os.pipe()
    with io.FileIO(write_end, "w") as stdout:
        run_processes([python_command("w", "print('hi')")], stdout=stdout, stderr=io.BytesIO())
        text = os.read(read_end, 1000).decode()
    os.close(read_end)
    assert ("\x1b[" in text) == is_terminal
    assert re.sub(r"\x1b\[[\d;]*m", "", text).split() == ["[w]", "hi"]


# ---- exit statuses


def test_returns_the_status_of_the_worker_that_failed_first():
    status, _, stderr = run("import time; time.sleep(600)", "raise SystemExit(7)")
    assert status == 7
    assert "======== worker 1 failed first: exit status 7 ========" in stderr


@pytest.mark.parametrize("name, status", [("SIGKILL", 137), ("SIGSEGV", 139), ("SIGABRT", 134)])
def test_a_worker_killed_by_a_signal_gives_128_plus_its_number(name, status):
    returned, _, stderr = run(f"import os, signal; os.kill(os.getpid(), signal.{name})")
    assert returned == status
    assert f"worker 0 failed first: killed by {name} (exit status {status})" in stderr


def test_a_late_failure_counts_after_others_have_succeeded():
    assert run("pass", "import time; time.sleep(0.3); raise SystemExit(4)")[0] == 4


def test_a_program_that_does_not_exist_gives_127():
    stderr = io.BytesIO()
    command = WorkerCommand("worker 0", ("/no/such/program",), dict(os.environ))
    assert run_processes([command], stdout=io.BytesIO(), stderr=stderr) == 127
    assert b"Cannot run '/no/such/program': No such file or directory." in stderr.getvalue()


def test_repeats_the_traceback_of_the_first_failure_at_the_end():
    failing = """
        import sys
        print("noise", file=sys.stderr)
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("the reason") from error
    """
    # The other worker also dies with a traceback, as peers of a dead worker do; a later one.
    following = """
        import signal, time
        def fail(*_): raise RuntimeError("a consequence")
        signal.signal(signal.SIGTERM, fail)
        print("ready", flush=True)
        time.sleep(600)
    """
    _, _, stderr = run(following, "import time; time.sleep(0.5)\n" + re.sub("^ {8}", "", failing,
                       flags=re.M))  # fmt: skip
    heading = "======== worker 1 failed first: exit status 1 ========\n"
    report = stderr.split(heading)[1]
    assert report.startswith("Traceback (most recent call last):\n")
    assert "KeyError: 'key'" in report
    assert report.endswith("ValueError: the reason\n")
    assert "noise" not in report
    assert "a consequence" not in report


def test_repeats_the_last_lines_of_a_worker_without_traceback():
    source = """
        import sys
        for i in range(1000): print("line", i, file=sys.stderr)
        sys.exit(2)
    """
    report = run(source)[2].split("========\n")[1]
    assert report.splitlines()[-1] == "line 999"
    assert len(report.splitlines()) < 100


# ---- ending the group


def test_other_workers_may_end_in_order_within_grace(tmp_path):
    saved = tmp_path / "saved"
    saving = f"""
        import signal, sys, time
        def save(*_):
            time.sleep(0.3)
            open({str(saved)!r}, "w")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        time.sleep(600)
    """
    assert run(saving, "import time; time.sleep(0.5); raise SystemExit(3)")[0] == 3
    assert saved.exists()


def test_children_of_workers_may_end_in_order_within_grace(tmp_path):
    # The worker dies of the SIGTERM at once; its child, in the same group, takes its time.
    saved = tmp_path / "saved"
    child = f"trap 'sleep 0.3; touch {saved}; exit' TERM; echo ready; sleep 600 & wait"
    source = f"""
        import subprocess, time
        subprocess.Popen(["sh", "-c", {child!r}])
        time.sleep(600)
    """
    start_s = time.monotonic()
    fails = "import time; time.sleep(0.5); raise SystemExit(3)"
    assert run(source, fails, grace_s=120.0)[0] == 3
    assert saved.exists()
    assert time.monotonic() - start_s < 100.0  # not the whole grace


def test_kills_a_worker_that_ignores_sigterm_when_grace_is_over():
    stubborn = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("pids", os.getpid(), flush=True)
        time.sleep(600)
    """
    start_s = time.monotonic()
    status, stdout, stderr = run(
        stubborn, "import time; time.sleep(0.5); raise SystemExit(3)", grace_s=0.5
    )
    assert status == 3
    assert 1.0 <= time.monotonic() - start_s < 100.0
    assert "some still run after 0.5 s" in stderr
    assert len(pids_in(stdout)) == 1 and not survivors(processes_with(pids_in(stdout)))


@pytest.mark.parametrize("status", [0, 5])
def test_no_child_outlives_the_job(status):
    returned, stdout, _ = run(FAMILY + f"raise SystemExit({status})", "pass")
    assert returned == status
    assert len(pids_in(stdout)) == 4
    assert not survivors(processes_with(pids_in(stdout)))  # one just killed may still be exiting


def test_a_process_without_mark_and_group_cannot_hang_the_launcher():
    source = """
        import subprocess
        sleep = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
        print("pids", sleep.pid)
    """
    status, stdout, _ = run(source, grace_s=0.2)
    assert status == 0
    (escaped,) = processes_with(pids_in(stdout))
    escaped.kill()


def test_a_failed_start_ends_the_workers_already_started():
    started = python_command("worker 0", "import time; time.sleep(600)")
    broken = WorkerCommand("worker 1", ("python",), {"BAD=NAME": "x"})
    with pytest.raises(ValueError, match="illegal environment"):
        run_processes([started, broken], stdout=io.BytesIO(), stderr=io.BytesIO())
    assert not [c for c in psutil.Process().children() if "time.sleep(600)" in str(c.cmdline())]


def test_leaves_the_callers_signal_handlers_as_they_were():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run("pass")
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_runs_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(run("print('hi')")))
    thread.start()
    thread.join()
    assert results == [(0, "[worker 0] hi\n", "")]


def test_rejects_an_empty_group():
    with pytest.raises(ValueError, match="at least one command"):
        run_processes([])


def test_rejects_a_negative_grace():
    with pytest.raises(ValueError, match=r"grace_s must be 0 or more. Received: -1"):
        run_processes([python_command("w", "pass")], grace_s=-1)


# ---- signals to the launcher, and its own death


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_stops_everything(number, tmp_path):
    with Launcher(tmp_path, FAMILY + SLEEP) as launcher:
        members = launcher.wait_for_members()
        assert len(members) == 8 and all(is_alive(m) for m in members)
        guard = launcher.guard()
        launcher.signal(number)
        _, stderr = launcher.process.communicate()
        assert launcher.process.returncode == 128 + number
        assert not [p for p in [*members, guard] if is_alive(p)]
        assert f"received {number.name}" in stderr
        assert "failed first" not in stderr


def test_ctrl_c_at_a_terminal_reaches_the_launcher_only(tmp_path):
    # A terminal sends SIGINT to the foreground process group. Workers must not be in it: a
    # KeyboardInterrupt in each of them would come before the launcher's orderly SIGTERM.
    with Launcher(tmp_path, FAMILY + SLEEP, start_new_session=True) as launcher:
        members = launcher.wait_for_members()
        os.killpg(launcher.process.pid, signal.SIGINT)
        stdout, stderr = launcher.process.communicate()
        assert launcher.process.returncode == 130
        assert not [m for m in members if is_alive(m)]
        assert "KeyboardInterrupt" not in stdout + stderr


def test_a_second_ctrl_c_does_not_wait_for_grace(tmp_path):
    source = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY + SLEEP
    with Launcher(tmp_path, source, "--grace-seconds", "600") as launcher:
        members = launcher.wait_for_members()
        launcher.signal(signal.SIGINT)
        launcher.process.stderr.readline()  # "received SIGINT ..."
        time.sleep(1.0)
        assert is_alive(members[0])
        launcher.signal(signal.SIGINT)
        launcher.process.communicate()
        assert launcher.process.returncode == 130
        assert not [m for m in members if is_alive(m)]


def test_a_signal_sent_twice_at_once_leaves_workers_their_grace(tmp_path):
    # As `timeout` and closing terminals do.
    saving = """
        import os, signal, sys, time
        def save(*_):
            time.sleep(0.3)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("pids", os.getpid(), flush=True)
        time.sleep(600)
    """
    with Launcher(tmp_path, saving) as launcher:
        launcher.wait_for_members()
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            launcher.signal(number)
            time.sleep(0.02)
        stdout, _ = launcher.process.communicate()
        assert launcher.process.returncode == 130
        assert sorted(stdout.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]


def test_kill_9_of_a_worker_stops_the_others(tmp_path):
    with Launcher(tmp_path, FAMILY + SLEEP) as launcher:
        members = launcher.wait_for_members()
        members[0].kill()
        _, stderr = launcher.process.communicate()
        assert launcher.process.returncode == 137
        assert not [m for m in members if is_alive(m)]
        assert re.search(r"worker \d failed first: killed by SIGKILL \(exit status 137\)", stderr)


def test_kill_9_of_the_launcher_leaves_no_process(tmp_path):
    with Launcher(tmp_path, FAMILY + SLEEP) as launcher:
        members = launcher.wait_for_members()
        guard = launcher.guard()
        launcher.signal(signal.SIGKILL)
        assert not survivors([*members, guard])


def test_workers_die_with_the_launcher_without_the_guard(tmp_path):
    with Launcher(tmp_path, FAMILY + SLEEP) as launcher:
        launcher.wait_for_members()
        workers = [m for m in launcher.members if m.ppid() == launcher.process.pid]
        assert len(workers) == 2
        launcher.guard().kill()
        launcher.signal(signal.SIGKILL)
        assert not survivors(workers)


def test_a_stalled_reader_does_not_delay_the_end_of_workers(tmp_path):
    source = "import sys\nsys.stdout = sys.stderr\n" + FAMILY + "while True: os.write(1, b'x\\n')"
    with Launcher(tmp_path, source, stderr=subprocess.STDOUT) as launcher:
        members = launcher.wait_for_members()
        time.sleep(0.5)  # nobody reads: all queues are full
        launcher.signal(signal.SIGTERM)
        assert not survivors(members)
        launcher.process.communicate()
        assert launcher.process.returncode == 143
