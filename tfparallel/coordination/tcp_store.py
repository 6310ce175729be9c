"""A `Store` of our own: rank 0 keeps it in memory, the others reach it over TCP.

For jobs that have no coordination service. Both ends of every connection first prove that they know
the job's token (`proof.py`); messages are lines of JSON, in clear. A rank is alive while
its first connection is open: the system closes it when the process ends, however it ends.
"""

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfparallel.coordination.listening import Door, Guest, listen
from tfparallel.coordination.proof import NotKnownError, introduce, key_of, until
from tfparallel.coordination.store import RankHasEnded

_ACCEPTING_S = 60.0  # at a time
_MOST_CONNECTIONS = 4096  # each has a thread; a rank needs a handful
_LARGEST_MESSAGE_BYTES = 1 << 24
_HAS_ENDED = "Rank 0, which keeps what the ranks agree on, has ended."


class StoreServer:
    """Keeps the store; lives in rank 0.

    Args:
        host: by which the other ranks reach this one; see `listen`.

    Attributes:
        port: where it listens.
        token: what a client has to know, hexadecimal; it never crosses the network.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(16)
        self._state, self._places = _State(), threading.Semaphore(_MOST_CONNECTIONS)
        self._listener = listen(host)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        with contextlib.suppress(OSError):  # not connected, which is nothing new
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError), Door(self._listener, key_of(self.token)) as door:
            while True:  # until it is closed
                guest = door.next(_ACCEPTING_S)
                if guest is None:
                    continue
                if self._places.acquire(blocking=False):
                    threading.Thread(target=self._serve, args=[guest], daemon=True).start()
                else:
                    guest.close()

    def _serve(self, guest: Guest) -> None:
        """Answers the requests of one connection until it closes."""
        rank, connection = None, guest.connection
        try:
            with connection, contextlib.suppress(OSError):  # the client has ended
                guest.answer()
                connection.settimeout(None)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                with connection.makefile("rwb") as stream:
                    while (line := stream.readline(_LARGEST_MESSAGE_BYTES)).endswith(b"\n"):
                        request = json.loads(line)
                        if request["do"] == "join":
                            rank = request["rank"]
                        answer = self._state.answer(**request)
                        stream.write(json.dumps(answer).encode() + b"\n")
                        stream.flush()
        finally:
            self._places.release()
            if rank is not None:
                self._state.leave(rank)


class _State:
    """What is stored, and which ranks are there."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._hosts: dict[int, str] = {}
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def answer(self, do: str, **arguments: object) -> object:
        """Carries out one request."""
        with self._changed:
            return getattr(self, f"_{do}")(**arguments)

    def leave(self, rank: int) -> None:
        """The process of `rank` has ended."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def _join(self, rank: int, host: str) -> None:
        self._hosts[rank] = host

    def _put(self, key: str, value: str, replace: bool) -> bool:
        if key in self._values and not replace:
            return False
        self._values[key] = value
        self._changed.notify_all()
        return True

    def _get(self, key: str, timeout_s: float) -> str | None:
        self._changed.wait_for(lambda: key in self._values, timeout_s)
        return self._values.get(key)

    def _delete(self, key: str) -> None:
        for own in [own for own in self._values if own == key or own.startswith(f"{key}/")]:
            del self._values[own]

    def _host(self, rank: int) -> str | None:
        return self._hosts.get(rank)

    def _has_left(self, rank: int) -> bool:
        return rank in self._left


@dataclass(frozen=True)
class _Stream:
    """A connection, and the file that reads and writes it."""

    connection: socket.socket
    file: Any

    def close(self) -> None:
        """Ends it."""
        self.file.close()
        self.connection.close()


class TcpStore:
    """A rank's access to a `StoreServer`, from any of its threads; see `store.Store`.

    Args:
        host, port, token: of the server.
        rank: this worker's.
        answer_s: how long rank 0 may take to let this one in, and to answer: it does at once, or
            does not run.
    """

    def __init__(self, host: str, port: int, token: str, rank: int, answer_s: float = 30.0):
        self._host, self._port, self._key, self._answer_s = host, port, key_of(token), answer_s
        self._thread = threading.local()
        self._presence: _Stream | None = None
        self._presence = self._connect()
        request = {"do": "join", "rank": rank, "host": socket.gethostname()}
        _ask(self._presence, answer_s, 0.0, request)

    def put(self, key: str, value: str) -> bool:
        """See `Store`."""
        return self._ask(do="put", key=key, value=value, replace=False)

    def replace(self, key: str, value: str) -> None:
        """Writes `value`, also where the key exists."""
        self._ask(do="put", key=key, value=value, replace=True)

    def get(self, key: str, timeout_s: float) -> str:
        """See `Store`."""
        value = self._ask(do="get", key=key, timeout_s=timeout_s)
        if value is None:
            raise TimeoutError(key)
        return value

    def delete(self, key: str) -> None:
        """See `Store`."""
        self._ask(do="delete", key=key)

    def describe(self, rank: int) -> str:
        """See `Store`."""
        return f"on host {self._ask(do='host', rank=rank)}"

    def require_alive(self, rank: int) -> None:
        """See `Store`."""
        if self._ask(do="has_left", rank=rank):
            raise RankHasEnded("It has ended, its own log says why: its connection is closed.")

    def _ask(self, **request: Any) -> Any:
        stream = getattr(self._thread, "stream", None)
        if stream is None:
            stream = self._thread.stream = self._connect()
        return _ask(stream, self._answer_s, request.get("timeout_s", 0.0), request)

    def _connect(self) -> _Stream:
        deadline = time.monotonic() + self._answer_s
        while True:
            try:
                connection = socket.create_connection((self._host, self._port), self._answer_s)
                break
            except ConnectionRefusedError as error:
                if self._presence is not None:  # it has listened before
                    raise ConnectionError(_HAS_ENDED) from error
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            introduce(connection, self._key, b"", until(deadline, "it"))
        except (NotKnownError, TimeoutError) as error:
            connection.close()
            raise ConnectionError(
                f"Expected rank 0 at {self._host}:{self._port}, which keeps what the ranks agree "
                f"on, to prove within {self._answer_s:g} s that it knows the job's token. Received "
                f"from what listens there: {error}."
            ) from error
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return _Stream(connection, connection.makefile("rwb"))


def _ask(stream: _Stream, answer_s: float, waits_s: float, request: Mapping[str, object]) -> Any:
    try:
        stream.connection.settimeout(waits_s + answer_s)
        stream.file.write(json.dumps(request).encode() + b"\n")
        stream.file.flush()
        line = stream.file.readline()
    except TimeoutError as error:
        raise ConnectionError(
            f"Rank 0, which keeps what the ranks agree on, has not answered for {answer_s:g} s: "
            "it is stopped, or cut off."
        ) from error
    except OSError as error:
        raise ConnectionError(f"Rank 0, which keeps what the ranks agree on: {error}") from error
    if not line:
        raise ConnectionError(_HAS_ENDED)
    return json.loads(line)
