"""The workers of a job open a ring: each connects to the next and lets the previous one in.

Likewise among partners, where the lower rank lets the higher one in.
"""

import contextlib
import itertools
import secrets
import socket
import struct
from collections.abc import Callable, Sequence

from tfparallel.communication.alpha_beta import SMALL_BYTES
from tfparallel.communication.doubling import all_reduce_exchanges
from tfparallel.communication.neighbours import Liveness, Neighbours
from tfparallel.communication.ring import Ring
from tfparallel.coordination.listening import all_known, listen

_CONNECT_TIMEOUT_S = 30.0
_TOKEN_BYTES = 16
_GUEST = struct.Struct("<q")  # follows the token: the rank of a partner, or
_PREVIOUS = -1


def connect_ring(
    rank: int,
    num_workers: int,
    host: str,
    exchange: Callable[[str, object], list],
    timeout_s: float | None = 1800.0,
    liveness: Liveness | None = None,
    tasks: Sequence[str] = (),
    small_bytes: int | None = None,
) -> Ring:
    """Opens a ring between all workers, which call this together.

    A connection counts only if it knows the token that its receiver drew.

    Args:
        rank, num_workers: this worker's position, and how many there are.
        host: where the other workers reach this one.
        exchange: `Agreement.exchange`: announces a value, returns all workers' values by rank.
        timeout_s, liveness, tasks: see `Neighbours`.
        small_bytes: see `Ring`. If None, two workers measure their link for up to about 0.2 s,
            longer only where single messages take longer. More of them would add in another order
            each time they start, and a resumed training would not have the same bits: they take
            `SMALL_BYTES`.

    Raises:
        OSError: if a worker could not reach another. All workers raise, and say which ones failed.
        PeerLostError: if a worker ends while links are measured.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    problem = None
    connections: dict[int, socket.socket] = {}
    to_next: list[socket.socket] = []
    partners = {each.partner for each in all_reduce_exchanges(rank, num_workers)}
    with listen(host) as listener:
        address = [host, listener.getsockname()[1], token.hex()]
        addresses = exchange("open a ring", address)
        try:
            to_next.append(_introduced(addresses[(rank + 1) % num_workers], _PREVIOUS))
            for partner in sorted(each for each in partners if each < rank):
                connections[partner] = _introduced(addresses[partner], rank)
            expected = 1 + sum(each > rank for each in partners)
            with contextlib.closing(all_known(listener, token, _CONNECT_TIMEOUT_S)) as guests:
                for guest in itertools.islice(guests, expected):
                    connections[_who(guest)] = guest
        except OSError as error:
            problem = f"rank {rank} at {host}: {error}"
    problems = [each for each in exchange("have opened a ring", problem) if each]
    if problems:
        for connection in (*to_next, *connections.values()):
            connection.close()
        raise ConnectionError("; ".join(problems))
    ends = to_next[0], connections.pop(_PREVIOUS)
    neighbours = Neighbours(
        rank, num_workers, *ends, timeout_s, liveness, tasks, partners=connections
    )
    ring = Ring(neighbours, SMALL_BYTES if small_bytes is None else small_bytes)
    if small_bytes is None and num_workers == 2:
        ring.measure()
    return ring


def _introduced(address: Sequence, guest: int) -> socket.socket:
    """A connection to a worker, which knows whose it is."""
    host, port, token = address
    return _connect(host, port, bytes.fromhex(token) + _GUEST.pack(guest))


def _who(guest: socket.socket) -> int:
    guest.settimeout(_CONNECT_TIMEOUT_S)
    guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    said = guest.recv(_GUEST.size, socket.MSG_WAITALL)
    if len(said) < _GUEST.size:
        raise ConnectionResetError("a rank that had connected has gone")
    return _GUEST.unpack(said)[0]


def _connect(host: str, port: int, token: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token)
    return connection
