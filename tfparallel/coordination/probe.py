"""Whether the tasks of a cluster are there: a TCP connection says so without TensorFlow.

The kernel accepts connections for a process that is stopped or busy: listening means "not gone".
Answering is more. A gRPC server sends an HTTP/2 SETTINGS frame to whoever connects, by threads of
its own; a stopped process does not. (TensorFlow's own question, `context.check_alive`, never
returns then, and keeps Python's lock.)

Source: HTTP/2, RFC 9113, sections 3.4 and 6.5.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_POLL_S = 0.2
_REPORT_S = 10.0


def is_listening(address: str, timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections at "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return True
    except OSError:
        return False


def is_answering(address: str, timeout_s: float = 2.0) -> bool:
    """Whether a gRPC server at "host:port" is there and runs."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            connection.sendall(_HELLO)
            return bool(connection.recv(1))
    except OSError:
        return False


def wait_for_tasks(
    addresses: Mapping[str, str],
    timeout_s: float | None,
    report: Callable[[str], None],
    speaker: str,
) -> None:
    """Waits until all tasks are listening.

    Args:
        addresses: "host:port" by the task's name, for example "worker 1".
        timeout_s: how long; None waits for ever.
        report: gets a sentence that names the missing tasks, every 10 s.
        speaker: the task that waits.

    Raises:
        TimeoutError: naming the tasks that are missing.
    """
    start_s = reported_s = time.monotonic()
    while missing := [task for task, address in addresses.items() if not is_listening(address)]:
        now_s = time.monotonic()
        waits_for = ", ".join(f"{task} ({addresses[task]})" for task in missing)
        if timeout_s is not None and now_s - start_s > timeout_s:
            raise TimeoutError(
                f"Expected all tasks to be there within {timeout_s:g} s. Received: nothing from "
                f"{waits_for}. Start them, or give them more time. ({speaker} is speaking.)"
            )
        if now_s - reported_s > _REPORT_S:
            reported_s = now_s
            report(f"{speaker} has been waiting {now_s - start_s:.0f} s for {waits_for}.")
        time.sleep(_POLL_S)


def task_names(cluster: Mapping[str, Sequence[str]], *types: str) -> dict[str, str]:
    """The addresses of all tasks of `types`, by name: `{"ps 0": "127.0.0.1:4000"}`."""
    return {f"{t} {i}": a for t in types for i, a in enumerate(cluster.get(t, ()))}
