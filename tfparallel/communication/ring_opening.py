"""The workers of a job open a ring: each connects to the next and lets the previous one in."""

import secrets
import socket
from collections.abc import Callable, Sequence

from tfparallel.communication.neighbours import Liveness, Neighbours
from tfparallel.communication.ring import Ring
from tfparallel.coordination.listening import accept_known, listen

_CONNECT_TIMEOUT_S = 30.0
_TOKEN_BYTES = 16


def connect_ring(
    rank: int,
    num_workers: int,
    host: str,
    exchange: Callable[[str, object], list],
    timeout_s: float | None = 1800.0,
    liveness: Liveness | None = None,
    tasks: Sequence[str] = (),
) -> Ring:
    """Opens a ring between all workers, which call this together.

    A connection counts only if it knows the token that its receiver drew.

    Args:
        rank, num_workers: this worker's position, and how many there are.
        host: where the other workers reach this one.
        exchange: `Agreement.exchange`: announces a value, returns all workers' values by rank.
        timeout_s, liveness, tasks: see `Neighbours`.

    Raises:
        OSError: if a worker could not reach the next. All workers raise, and say which ones failed.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    problem, connections = None, []
    with listen(host) as listener:
        address = [host, listener.getsockname()[1], token.hex()]
        addresses = exchange("open a ring", address)
        try:
            next_host, next_port, next_token = addresses[(rank + 1) % num_workers]
            connections.append(_connect(next_host, next_port, bytes.fromhex(next_token)))
            connections.append(accept_known(listener, token, _CONNECT_TIMEOUT_S))
        except OSError as error:
            problem = f"rank {rank} at {host}: {error}"
    problems = [each for each in exchange("have opened a ring", problem) if each]
    if problems:
        for connection in connections:
            connection.close()
        raise ConnectionError("; ".join(problems))
    to_next, from_previous = connections
    return Ring(Neighbours(rank, num_workers, to_next, from_previous, timeout_s, liveness, tasks))


def _connect(host: str, port: int, token: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token)
    return connection
