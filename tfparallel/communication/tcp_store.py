"""A `Store` of our own: rank 0 keeps it in memory, the others reach it over TCP.

For jobs that have no coordination service. Every connection first shows the job's token; messages
are lines of JSON. A rank is alive while its first connection is open: the system closes it when the
process ends, however it ends.
"""

import contextlib
import json
import secrets
import socket
import socketserver
import threading
import time
from typing import Any

_CONNECT_TIMEOUT_S = 30.0


class StoreServer:
    """Keeps the store; lives in rank 0.

    Attributes:
        port: where it listens, on all interfaces.
        token: what a client has to show, hexadecimal.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        state = _State()
        token = self.token

        class Handler(socketserver.StreamRequestHandler):
            """One connection of a client."""

            def handle(self) -> None:
                """Answers its requests until it closes."""
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                shown = self.rfile.readline(len(token) + 1).decode(errors="replace").strip()
                if not secrets.compare_digest(shown, token):
                    return
                rank = None
                with contextlib.suppress(ConnectionError):  # the client has ended
                    for line in self.rfile:
                        request = json.loads(line)
                        if request["do"] == "join":
                            rank = request["rank"]
                        answer = state.answer(**request)
                        self.wfile.write(json.dumps(answer).encode() + b"\n")
                if rank is not None:
                    state.leave(rank)

        self._server = _Server(("", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    if socket.has_dualstack_ipv6():
        address_family = socket.AF_INET6

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _State:
    """What is stored, and which ranks are there."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._hosts: dict[int, str] = {}
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def answer(self, do: str, **arguments: Any) -> Any:
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
        self._values.pop(key, None)

    def _host(self, rank: int) -> str | None:
        return self._hosts.get(rank)

    def _has_left(self, rank: int) -> bool:
        return rank in self._left


class TcpStore:
    """A rank's access to a `StoreServer`, from any of its threads; see `store.Store`.

    Args:
        host, port, token: of the server.
        rank: this worker's.
    """

    def __init__(self, host: str, port: int, token: str, rank: int):
        self._host, self._port, self._token = host, port, token
        self._thread = threading.local()
        self._presence = self._connect()
        _ask(self._presence, do="join", rank=rank, host=socket.gethostname())

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
            raise ConnectionError("its connection is closed.")

    def _ask(self, **request: Any) -> Any:
        stream = getattr(self._thread, "stream", None)
        if stream is None:
            stream = self._thread.stream = self._connect()
        return _ask(stream, **request)

    def _connect(self) -> Any:
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        while True:
            try:
                connection = socket.create_connection(
                    (self._host, self._port), timeout=_CONNECT_TIMEOUT_S
                )
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream = connection.makefile("rwb")
        connection.close()  # the stream keeps it open
        stream.write(self._token.encode() + b"\n")
        return stream


def _ask(stream: Any, **request: Any) -> Any:
    try:
        stream.write(json.dumps(request).encode() + b"\n")
        stream.flush()
        line = stream.readline()
    except OSError as error:
        raise ConnectionError(f"Rank 0, which keeps what the ranks agree on: {error}") from error
    if not line:
        raise ConnectionError("Rank 0, which keeps what the ranks agree on, has ended.")
    return json.loads(line)
