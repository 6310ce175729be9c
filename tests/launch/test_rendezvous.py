"""Launchers meet, whoever else has connected; who does not start the same job is refused."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.launch.test_hosts import free_port, start, tasks_of  # noqa: F401
from tfparallel.coordination.patience import WaitedTooLong
from tfparallel.coordination.proof import key_of
from tfparallel.launch import rendezvous as rendezvous_module
from tfparallel.launch.nodes import Place
from tfparallel.launch.rendezvous import Rendezvous

pytestmark = pytest.mark.timeout(120)
COMMAND = "train.py []"


def node(rank, port, num_nodes=2, what=COMMAND, limit_s=30, notes=None):
    place = Place(num_nodes, rank, "127.0.0.1", port)
    return Rendezvous(place, what, limit_s, (notes if notes is not None else []).append)


def offer(rank):
    return {"worker": [f"10.0.0.{rank}:1"]}


def meets(rank, port, number=0, **options):
    with node(rank, port, **options) as rendezvous:
        return rendezvous.exchange(number, offer(rank))


def stranger_at(port):
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_all_nodes_are_told_what_all_have_in_every_round():
    port = free_port()

    def run(rank):
        with node(rank, port, 4) as rendezvous:
            return [rendezvous.exchange(number, offer(rank)) for number in range(3)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [[[offer(rank) for rank in range(4)]] * 3] * 4


def test_a_hundred_silent_strangers_hold_up_nobody():
    port = free_port()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        first = pool.submit(meets, 0, port)
        for _ in range(100):
            stack.enter_context(stranger_at(port))
        began = time.monotonic()
        assert pool.submit(meets, 1, port).result(30) == [offer(0), offer(1)]
        assert first.result(30) == [offer(0), offer(1)]
        # One after the other, each would have been waited for: 5 s.
        assert time.monotonic() - began < 25


def test_random_messages_cost_neither_a_traceback_nor_the_meeting(capfd):
    port, random, notes = free_port(), np.random.default_rng(0), []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meets, 0, port, notes=notes)
        for i in range(300):
            with stranger_at(port) as stranger, contextlib.suppress(OSError):
                text = b'{"rank": 1}\n' if i % 3 == 0 else b""
                stranger.sendall(text + random.bytes(int(random.integers(0, 3000))))
        assert pool.submit(meets, 1, port).result(30) == [offer(0), offer(1)]
        assert first.result(30) == [offer(0), offer(1)]
    assert (notes, capfd.readouterr().err) == ([], "")


@pytest.mark.parametrize("differs", ["the command", "the number of nodes", "the secret"])
def test_who_does_not_start_the_same_job_is_refused(differs, monkeypatch):
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meets, 0, port, limit_s=1.5)
        stranger_at(port).close()  # node 0 has made its key
        if differs == "the secret":
            monkeypatch.setattr(
                rendezvous_module, "key_of", lambda job: key_of(job, {"TFPARALLEL_SECRET": "b"})
            )
        other = {"the command": {"what": "other.py"}, "the number of nodes": {"num_nodes": 3}}
        with pytest.raises(ValueError, match="TFPARALLEL_SECRET. Received: a refusal.*Node 1 is"):
            meets(1, port, **other.get(differs, {}))
        with pytest.raises(WaitedTooLong, match="come to the rendezvous within 1.5 s"):
            first.result(30)


def test_it_listens_where_the_rendezvous_is():
    port = free_port()
    with node(0, port), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)


def test_a_taken_port_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        node(0, taken.getsockname()[1]).__enter__()


def test_who_waits_for_node_0_to_answer_says_so_and_ends(monkeypatch):
    """Something listens there, and says nothing."""
    monkeypatch.setattr("tfparallel.coordination.patience.SAY_AFTER_S", 0.3)
    notes = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(WaitedTooLong, match="node 0 .* to answer, when all nodes have come"):
            meets(1, port, limit_s=1.2, notes=notes)
    assert f"for node 0 (127.0.0.1:{port}) to answer" in notes[0]


def test_two_launchers_meet_while_strangers_hang_on(start):  # noqa: F811
    port, ended, silent = free_port(), threading.Event(), []
    meeting = ("--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}")

    def hang_on():
        for _ in range(100):
            silent.append(stranger_at(port))
        while not ended.is_set():  # some of them leave and come back, and talk
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            time.sleep(0.02)

    secret = {"TFPARALLEL_SECRET": "a secret of 16 b"}
    first = start(*meeting, "--node-rank", "0", "show.py", **secret)
    thread = threading.Thread(target=hang_on)
    thread.start()
    try:
        while len(silent) < 100:
            time.sleep(0.02)
        second = start(*meeting, "--node-rank", "1", "show.py", **secret)
        tasks, _ = tasks_of([first, second])
    finally:
        ended.set()
        thread.join(20)
    assert len(tasks) == 2
    for stranger in silent:
        stranger.close()


def test_a_dry_run_does_not_print_the_secret(start):  # noqa: F811
    shown = start("--standalone", "--dry-run", "--workers", "1", "show.py", TFPARALLEL_SECRET="s3")
    out, err = shown.communicate(timeout=60)
    assert shown.returncode == 0 and "TFPARALLEL_RESTART" in out, err
    assert "TFPARALLEL_SECRET" not in out + err
    over_ssh = start("--hosts", "a,b", "--dry-run", "show.py", TFPARALLEL_SECRET="s3cret")
    out, err = over_ssh.communicate(timeout=60)
    assert over_ssh.returncode == 0, err
    assert "SendEnv=TFPARALLEL_SECRET" in out and "s3cret" not in out
