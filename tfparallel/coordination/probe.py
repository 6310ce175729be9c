"""Whether the tasks of a cluster are there: a TCP connection says so without TensorFlow.

The kernel accepts connections for a process that is stopped or busy: listening means "not gone".
Answering is more. A gRPC server sends an HTTP/2 SETTINGS frame to whoever connects, by threads of
its own; a stopped process does not, and a stranger at the port sends something else. (TensorFlow's
own question, `context.check_alive`, never returns then, and keeps Python's lock.)

Source: HTTP/2, RFC 9113, sections 3.4 and 6.5.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEAD_BYTES, _KIND, _SETTINGS = 9, 3, 4  # of HTTP/2
_MOST_SHOWN = 40


def is_listening(address: str, timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections at "host:port"."""
    try:
        with _connected(address, timeout_s):
            return True
    except OSError:
        return False


def is_closed(address: str, timeout_s: float = 1.0) -> bool:
    """Whether the host at "host:port" says that nothing listens there."""
    try:
        _connected(address, timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def is_answering(address: str, timeout_s: float = 2.0) -> bool:
    """Whether a gRPC server at "host:port" is there and runs."""
    return not what_answers(address, timeout_s)


def what_answers(address: str, timeout_s: float = 2.0) -> str:
    """What is there instead of a gRPC server that runs, in words; "" if one is there."""
    answer = ask(address, timeout_s)
    return answer if isinstance(answer, str) else describe_answer(answer)


def ask(address: str, timeout_s: float = 2.0) -> bytes | None | str:
    """The first bytes that answer to HTTP/2; None for silence, words where nothing is reached."""
    try:
        connection = _connected(address, timeout_s)
    except ConnectionRefusedError:
        return "nothing listens"
    except TimeoutError:
        return "nothing answers"
    except OSError as error:
        return f"nothing is reached: {error.strerror or error}"
    with connection:
        return _answer(connection, _HELLO, timeout_s)


def describe_answer(answer: bytes | None) -> str:
    """What a server is that has answered so to HTTP/2, in words; "" for a gRPC server.

    Args:
        answer: its first bytes; None if it was silent.
    """
    if answer is None:
        return "something listens and says nothing"
    if not answer:
        return "something closes the connection"
    if len(answer) > _KIND and answer[:2] == b"\0\0" and answer[_KIND] == _SETTINGS:
        return ""
    return f"a stranger answers {answer[:_MOST_SHOWN]!r}"


def _answer(connection: socket.socket, hello: bytes, timeout_s: float) -> bytes | None:
    """The first bytes that come back, at least those that tell a gRPC server; None for silence."""
    received, deadline_s = b"", time.monotonic() + timeout_s
    try:
        connection.sendall(hello)
        while len(received) < _FRAME_HEAD_BYTES:
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            if not (more := connection.recv(_MOST_SHOWN)):
                break
            received += more
    except TimeoutError:
        return received or None
    except OSError:
        pass  # it has closed the connection: what it has said before counts
    return received


def _connected(address: str, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout_s)


def answering(
    addresses: Mapping[str, str], is_there: Callable[[str], bool] = is_answering
) -> list[str]:
    """The names of those tasks that answer, asked all at once."""
    found: list[str] = []

    def ask_one(name: str) -> None:
        with contextlib.suppress(OSError):
            if is_there(addresses[name]):
                found.append(name)

    threads = [threading.Thread(target=ask_one, args=(name,), daemon=True) for name in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # each asks for `timeout_s` at most
    return [name for name in addresses if name in found]


def task_names(cluster: Mapping[str, Sequence[str]], *types: str) -> dict[str, str]:
    """The addresses of all tasks of `types`, by name: `{"ps 0": "127.0.0.1:4000"}`."""
    return {f"{t} {i}": a for t in types for i, a in enumerate(cluster.get(t, ()))}
