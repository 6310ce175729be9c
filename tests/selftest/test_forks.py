"""Processes that have a fork of another do their work: where they are, and ending as it does."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfparallel.selftest.forks import ask_for_fork, listen_for_forks, serve_forks

ASK = """
import sys
from tfparallel.selftest.forks import ask_for_fork
sys.exit(ask_for_fork(sys.argv[1], sys.argv[2:]))
"""
pytestmark = pytest.mark.timeout(120)


def work(what: str, *arguments: str) -> int:
    """What forks do in these tests."""
    if what == "tell":
        print(os.environ["OWN"], os.getcwd(), tempfile.gettempdir(), *arguments)
        print(*os.sched_getaffinity(0), file=sys.stderr)
        return 7
    if what == "raise":
        raise RuntimeError("it went wrong")
    print(os.getpid(), flush=True)
    if what == "die":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)
    return 0


def serve_work(folder: str) -> None:
    """Starts a process that serves, and ends without a word to it."""
    with listen_for_forks(folder) as listener:
        context = multiprocessing.get_context("forkserver")
        server = context.Process(target=serve_forks, args=(listener, work))
        server.start()
    print(server.pid, flush=True)
    sys.stdin.read()
    os._exit(0)


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """Of a server, which ends with its starter; its name is longer than addresses of sockets."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    text = f"from {__name__} import serve_work; serve_work({str(long)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        server = int(starter.stdout.readline())
        yield long
        starter.stdin.close()
    wait_for_end_of(server)


def asking(folder: Path, *arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", ASK, str(folder), *arguments]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, **pipes, **options)


def wait_for_end_of(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)


def test_a_fork_works_where_who_asked_is_and_says_how_it_ends(folder, tmp_path):
    core = min(os.sched_getaffinity(0))
    own = {**os.environ, "OWN": "its own", "TMPDIR": str(tmp_path)}
    process = asking(
        folder,
        *("tell", "a word"),
        cwd=tmp_path,
        env={**own, "PYTHONPATH": str(Path(__file__).parents[2])},
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
    )
    output, errors = process.communicate()
    assert output == f"its own {tmp_path} {tmp_path} a word\n"
    assert (errors, process.returncode) == (f"{core}\n", 7)


def test_an_error_is_told_where_who_asked_tells_its_own(folder):
    process = asking(folder, "raise")
    _, errors = process.communicate()
    assert process.returncode == 1 and "RuntimeError: it went wrong" in errors


def test_who_asked_ends_by_the_signal_that_ends_its_fork(folder):
    process = asking(folder, "die")
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_a_fork_ends_when_who_asked_has(folder):
    process = asking(folder, "sleep")
    fork = int(process.stdout.readline())
    process.kill()
    process.communicate()
    wait_for_end_of(fork)


def test_where_nobody_listens_nobody_forks(tmp_path):
    assert ask_for_fork(str(tmp_path), ["tell"]) is None
    listen_for_forks(str(tmp_path)).close()
    assert ask_for_fork(str(tmp_path), ["tell"]) is None
