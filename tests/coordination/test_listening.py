"""Who may come in, how many may stand at the door, and how long; where a job listens."""

import contextlib
import errno
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfparallel.coordination import listening
from tfparallel.coordination.listening import Door, listen
from tfparallel.coordination.proof import NotKnownError, introduce, key_of, until

KEY = key_of("token", {})


@pytest.fixture
def listener():
    with listen("127.0.0.1") as listener:
        yield listener


def stranger_at(listener):
    return socket.create_connection(listener.getsockname(), timeout=10)


def comes_in(listener, key=KEY, message=b""):
    """What a guest is answered."""
    with stranger_at(listener) as connection:
        return introduce(connection, key, message, until(time.monotonic() + 10, "it"), 100)


def is_closed(stranger):
    """Whether a stranger is turned away, who has taken note of what it was asked."""
    with contextlib.suppress(ConnectionResetError):  # what it said was not all read
        while stranger.recv(100):
            pass
    return True


def test_a_guest_says_something_and_is_answered(listener):
    with Door(listener, KEY, 5) as door, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(comes_in, listener, message=b"hello")
        guest = door.next(10.0)
        assert guest.message == b"hello"
        guest.answer(b"welcome")
        assert answer.result(10) == b"welcome"
        guest.close()


def test_one_who_does_not_know_the_token_or_says_too_much_is_turned_away(listener):
    with Door(listener, KEY, 5) as door, ThreadPoolExecutor(2) as pool:
        refused = [
            pool.submit(comes_in, listener, key=key_of("another", {})),
            pool.submit(comes_in, listener, message=b"123456"),
        ]
        assert door.next(0.5) is None
        for each in refused:
            with pytest.raises(NotKnownError, match="has another TFPARALLEL_SECRET"):
                each.result(10)


def test_while_there_is_no_room_the_first_leaves_soon_and_all_come_in(listener, monkeypatch):
    monkeypatch.setattr(listening, "_MOST_GUESTS", 2)
    monkeypatch.setattr(listening, "_GREETING_S", 1000.0)
    with (
        Door(listener, KEY) as door,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(1) as pool,
    ):
        strangers = [stack.enter_context(stranger_at(listener)) for _ in range(5)]
        answer = pool.submit(comes_in, listener)
        guest = door.next(20.0)
        assert guest is not None
        guest.answer()
        answer.result(10)
        assert all(map(is_closed, strangers[:3]))
        guest.close()


def test_who_says_nothing_is_turned_away_in_time(listener, monkeypatch):
    monkeypatch.setattr(listening, "_GREETING_S", 0.2)
    with Door(listener, KEY) as door, stranger_at(listener) as stranger:
        stranger.sendall(b"half")
        assert door.next(0.5) is None
        assert is_closed(stranger)


def test_random_bytes_are_turned_away_and_leave_nothing_behind(listener):
    random = np.random.default_rng(0)
    ended = threading.Event()

    def sends_random_bytes():
        for _ in range(300):
            with stranger_at(listener) as stranger, contextlib.suppress(OSError):
                stranger.sendall(random.bytes(int(random.integers(0, 5000))))
                stranger.shutdown(socket.SHUT_WR)
                is_closed(stranger)
        ended.set()

    with Door(listener, KEY, 1 << 16) as door, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sends_random_bytes)
        tracemalloc.start()
        while not ended.is_set():
            assert door.next(0.1) is None
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        sending.result(10)
        assert most_bytes < 4 << 20, most_bytes
        answer = pool.submit(comes_in, listener)
        door.next(10.0).answer()
        answer.result(10)


def test_a_taken_port_is_no_reason_to_listen_elsewhere(listener):
    with pytest.raises(OSError) as caught:
        listen("127.0.0.1", listener.getsockname()[1])
    assert caught.value.errno == errno.EADDRINUSE


def test_a_host_of_another_machine_is_listened_for_everywhere():
    with listen("192.0.2.1") as everywhere:  # RFC 5737: nobody's
        assert everywhere.getsockname()[0] in ("0.0.0.0", "::")
