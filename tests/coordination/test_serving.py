"""The end of a job with a chief takes no longer than it is given, whoever does not end."""

import os
import socket
import threading
import time

from tfparallel.coordination import connection, serving
from tfparallel.coordination.timeouts import Timeouts

FIXED_BEFORE_S = 10.0, 5.0  # what a server, and the chief, took whatever was asked for


def test_a_server_ends_though_the_chief_that_is_done_stays():
    reading_end, writing_end = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as chief:
        os.write(writing_end, b"done")
        began = time.monotonic()
        address = f"127.0.0.1:{chief.getsockname()[1]}"
        serving._wait_for_end(reading_end, "worker 0", address, Timeouts(end_s=1.0))
        assert 1.0 <= time.monotonic() - began < FIXED_BEFORE_S[0]


def test_a_server_ends_with_the_chief():
    reading_end, writing_end = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as chief:
        address = f"127.0.0.1:{chief.getsockname()[1]}"
    os.write(writing_end, b"done")
    serving._wait_for_end(reading_end, "worker 0", address, Timeouts(end_s=1e6))


def test_the_chief_ends_though_a_server_cannot_be_told(monkeypatch):
    """It waits half of `end_s`, and then goes: `connect` says so at the process's end."""
    at_end, release = [], threading.Event()
    stuck = threading.Thread(target=release.wait, args=(60,), daemon=True)
    stuck.start()
    for name in ("wait_for_tasks", "say_here", "keep_traced_functions"):
        monkeypatch.setattr(connection, name, lambda *_: None)
    monkeypatch.setattr(connection.tf.config, "experimental_connect_to_cluster", lambda *_, **__: 0)
    monkeypatch.setattr(connection.atexit, "register", at_end.append)
    monkeypatch.setattr(connection, "_connected", None)
    monkeypatch.setattr(connection, "_servers_to_tell", [])
    monkeypatch.setenv("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "")  # taken back at the end
    monkeypatch.setattr(serving, "_tell", lambda devices, word: [stuck] * len(devices))
    tasks = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    servers = [("worker", 0), ("worker", 1)]
    connection.connect(tasks, "chief", 0, servers, Timeouts(end_s=2.0))
    began = time.monotonic()
    (at_process_end,) = at_end
    at_process_end()
    assert 1.0 <= time.monotonic() - began < FIXED_BEFORE_S[1]
    release.set()
