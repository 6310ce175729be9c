"""Who may come in, and how many may stand at the door."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

from tfparallel.coordination import listening


def test_of_too_many_guests_the_first_is_turned_away(monkeypatch):
    monkeypatch.setattr(listening, "_MOST_GUESTS", 2)
    with listening.listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as pool:
        address = listener.getsockname()
        accepted = pool.submit(listening.accept_known, listener, b"token", 30.0)
        with contextlib.ExitStack() as stack:
            guests = [
                stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(3)
            ]
            assert guests[0].recv(1) == b""  # closed, while the others still wait
            guests[2].sendall(b"token")
            with accepted.result() as known:
                known.sendall(b"welcome")
            assert guests[2].recv(7) == b"welcome"
