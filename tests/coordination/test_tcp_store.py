"""The store of rank 0: what is written is read, who ends is known, strangers learn nothing."""

import contextlib
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from tfparallel.coordination.agreement import Agreement, DisagreementError
from tfparallel.coordination.tcp_store import StoreServer, TcpStore


@pytest.fixture
def server():
    server = StoreServer("localhost")
    yield server
    server.close()


def client(server, rank, token=None):
    return TcpStore("localhost", server.port, token or server.token, rank)


def test_a_value_is_read_by_all_and_written_once(server):
    first, second = client(server, 0), client(server, 1)
    assert first.put("key", "value")
    assert not second.put("key", "other")
    assert second.get("key", 1.0) == "value"
    second.replace("key", "new")
    assert first.get("key", 1.0) == "new"
    first.delete("key")
    with pytest.raises(TimeoutError):
        second.get("key", 0.01)


def test_a_key_is_deleted_with_all_below_it(server):
    store = client(server, 0)
    for key in ("a", "a/1", "a/2/3", "ab"):
        store.put(key, key)
    store.delete("a")
    for key in ("a", "a/1", "a/2/3"):
        with pytest.raises(TimeoutError):
            store.get(key, 0.01)
    assert store.get("ab", 1.0) == "ab"


def test_a_reader_waits_for_a_writer(server):
    reader, writer = client(server, 0), client(server, 1)
    timer = threading.Timer(0.1, lambda: writer.put("late", "here"))
    timer.start()
    assert reader.get("late", 10.0) == "here"
    timer.join()


def test_a_stranger_is_turned_away(server):
    with pytest.raises(ConnectionError):
        client(server, 1, token="0" * 32)
    with stranger_of(server) as stranger:
        stranger.sendall(
            b"GET / HTTP/1.0\nHost: somebody who asks a web server" + b" " * 40 + b"\n\n"
        )
        assert_is_closed(stranger)


def stranger_of(server):
    stranger = socket.create_connection(("localhost", server.port), timeout=10)
    assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32  # the challenge
    return stranger


def assert_is_closed(connection):
    with contextlib.suppress(ConnectionResetError):  # what was sent was not all read
        assert connection.recv(100) == b""


def test_random_bytes_cost_neither_an_answer_nor_a_traceback(server, capfd):
    random = np.random.default_rng(0)
    for length in [0, 1, 31, 32, 68, 69, 200, 70_000] * 5:
        with stranger_of(server) as stranger, contextlib.suppress(OSError):
            stranger.sendall(random.bytes(length))
            stranger.shutdown(socket.SHUT_WR)
            assert_is_closed(stranger)
    assert client(server, 0).put("key", "value")
    assert capfd.readouterr().err == ""


def test_who_says_nothing_is_turned_away_in_time_and_holds_up_nobody(server, monkeypatch):
    monkeypatch.setattr("tfparallel.coordination.listening._GREETING_S", 0.2)
    strangers = [stranger_of(server) for _ in range(20)]
    assert client(server, 0).put("key", "value")
    for stranger in strangers:
        assert_is_closed(stranger)
        stranger.close()


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr("tfparallel.coordination.tcp_store._MOST_CONNECTIONS", 2)
    server = StoreServer("localhost")
    first = [client(server, rank) for rank in range(2)]
    with pytest.raises(ConnectionError, match="it has closed the connection"):
        client(server, 2)
    first[0]._presence.close()
    assert first[1]._presence.file.closed is False
    server.close()


def test_the_token_does_not_cross_the_network(server):
    with socket.create_server(("127.0.0.1", 0)) as eavesdropper:
        heard = []

        def listen():
            connection, _ = eavesdropper.accept()
            with connection:
                connection.sendall(b"c" * 32)
                heard.append(connection.recv(1000))
                connection.sendall(b"c" * 36)

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(ConnectionError, match="Expected rank 0 .* to prove within 7 s"):
            TcpStore("127.0.0.1", eavesdropper.getsockname()[1], server.token, 0, 7.0)
        thread.join()
    assert heard and server.token.encode() not in heard[0]


def test_listens_where_the_job_is(server):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=10)


PEER = """
import sys, time
sys.path.insert(0, {root!r})
from tfparallel.coordination.tcp_store import TcpStore
store = TcpStore("localhost", {port}, {token!r}, rank=1)
store.put("ready", "yes")
time.sleep(100)
"""


@pytest.mark.timeout(60)
def test_a_killed_rank_is_named_to_who_waits_for_it(server, pytestconfig, monkeypatch):
    monkeypatch.setattr("tfparallel.coordination.agreement._PATIENCE_S", 0.2)
    program = PEER.format(root=str(pytestconfig.rootpath), port=server.port, token=server.token)
    peer = subprocess.Popen([sys.executable, "-c", program])
    store = client(server, 0)
    assert store.get("ready", 30.0) == "yes"
    store.require_alive(1)
    peer.kill()
    peer.wait()
    agreement = Agreement(store, "test", rank=0, num_workers=2)
    expected = f"Expected rank 1 of 2 .on host {socket.gethostname()}. to call fit. It has ended"
    with pytest.raises(DisagreementError, match=expected):
        agreement.exchange("call fit", None)


def test_ranks_in_different_steps_are_told_so(server):
    agreements = [Agreement(client(server, rank), "test", rank, 2) for rank in range(2)]
    errors = []

    def step(agreement, kind):
        try:
            agreement.exchange(kind, 1)
        except DisagreementError as error:
            errors.append(str(error))

    threads = [
        threading.Thread(target=step, args=pair)
        for pair in zip(agreements, ["call fit", "call evaluate"], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("rank 0: to call fit" in e and "rank 1: to call evaluate" in e for e in errors)
