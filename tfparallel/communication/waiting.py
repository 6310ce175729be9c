"""A worker that waits for its peers says for whom, again and again, until they are there."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

_PROBE_TIMEOUT_S = 1.0


@contextlib.contextmanager
def reporting_absent_peers(
    rank: int, peers: Sequence[str], every_s: float = 10.0
) -> Iterator[None]:
    """While the body waits for other workers, logs a warning naming those that cannot be reached.

    Args:
        rank: the rank of this worker, which is speaking.
        peers: the addresses, "host:port", of the other workers.
        every_s: seconds between two warnings.
    """
    done = threading.Event()
    thread = threading.Thread(
        target=_report, args=(rank, peers, every_s, done), name="absent-peers", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()


def _report(rank: int, peers: Sequence[str], every_s: float, done: threading.Event) -> None:
    started = time.monotonic()
    while not done.wait(every_s):
        absent = [address for address in peers if not _is_listening(address)]
        waits_for = f"cannot reach {', '.join(absent)}" if absent else "all are reachable"
        tf.get_logger().warning(
            "[rank %d] has waited %.0f s for the other workers to start training: %s.",
            rank,
            time.monotonic() - started,
            waits_for,
        )


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False
