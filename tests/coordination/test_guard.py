"""The guard ends calls that wait with Python's lock held, in which no thread of Python runs."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tfparallel.coordination as coordination
from tests.multi_process.pool import REPOSITORY

pytestmark = pytest.mark.turns

WAITS = """
import ctypes, json, socket, subprocess, sys, time
from pathlib import Path
import tfparallel.coordination.watch as watch
address = sys.argv[1]
host, _, port = address.rpartition(":")
connection = socket.create_connection((host, int(port)))
connection.settimeout(None)
guard = watch._start_guard({"worker 0": address}, 0.5, True)
print("waits", flush=True)
held = ctypes.PyDLL(None)  # unlike CDLL, it keeps Python's lock in a call
received = held.recv(connection.fileno(), ctypes.create_string_buffer(8), 8, 0)
print("recv gave", received, flush=True)
"""


@pytest.mark.timeout(90)
def test_a_call_that_keeps_the_lock_ends_when_the_silent_task_is_cut_off():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        finished = subprocess.run(
            [sys.executable, "-c", WAITS, address],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "recv gave 0" in finished.stdout, finished.stderr


@pytest.mark.timeout(90)
def test_a_process_that_cannot_be_helped_is_killed_and_the_silent_task_named():
    """It waits for something else than a connection."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        program = WAITS.replace("held.recv(", "held.sleep(300) or held.recv(")
        program = program.replace("watch._start", "watch._CUT_FOR_S = 2.0; guard = watch._start")
        finished = subprocess.run(
            [sys.executable, "-c", program, address],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert finished.returncode == -signal.SIGKILL
    assert f"no answer from worker 0 ({address})" in finished.stderr, finished.stderr


def test_it_ends_with_the_process_that_it_guards():
    script = Path(coordination.__path__[0]) / "guard.py"
    orders = {"addresses": {}, "patience_s": 1.0, "cuts_all": True, "pid": 1, "cut_for_s": 1.0}
    guard = subprocess.run(
        [sys.executable, "-E", "-S", "-s", script, json.dumps(orders)],
        stdin=subprocess.DEVNULL,
        timeout=20,
        check=False,
    )
    assert guard.returncode == 0
