"""The workers of a job open a ring: each connects to the next and lets the previous one in.

Likewise among partners, where the lower rank lets the higher one in.
"""

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfparallel.communication.alpha_beta import SMALL_BYTES, most_halved_bytes
from tfparallel.communication.doubling import all_reduce_exchanges
from tfparallel.communication.neighbours import Liveness, Neighbours
from tfparallel.communication.pacing import pace_if_far
from tfparallel.communication.ring import Ring
from tfparallel.communication.ring_of_hosts import RingOfHosts, equal_groups
from tfparallel.coordination.listening import Door, listen
from tfparallel.coordination.proof import introduce, key_of, until

_TOKEN_BYTES = 16
_GUEST = struct.Struct("<q")  # what a guest says: its rank, as a partner, or
_PREVIOUS = -1
_NEXT = -2  # whose guest this worker is
_OPEN = "open a ring"
NOTHING = -1  # is small


def connect_ring(
    rank: int,
    num_workers: int,
    host: str,
    exchange: Callable[[str, object], list],
    timeout_s: float | None = 1800.0,
    liveness: Liveness | None = None,
    tasks: Sequence[str] = (),
    small_bytes: int | None = None,
    answer_s: float = 60.0,
    names: Sequence[int] = (),
    hosts_first: bool = False,
) -> Ring:
    """Opens a ring between all workers, which call this together.

    A connection counts only if both ends prove that they know the token that its receiver drew.

    Args:
        rank, num_workers: this worker's position, and how many there are.
        host: where the other workers reach this one.
        exchange: `Agreement.exchange`: announces a value, returns all workers' values by rank.
        timeout_s, liveness, tasks, names: see `Neighbours`.
        small_bytes: see `Ring`; `NOTHING` spares the connections to partners. If None, two workers
            measure their link for up to about 0.2 s, longer only where single messages take longer.
            More of them would add in another order each time they start, and a resumed training
            would not have the same bits: they take `SMALL_BYTES`.
        answer_s: for all connections of this worker to be there. All others are when it begins.
        hosts_first: where each host has equally many workers, more than one, they meet among
            themselves before hosts meet (`RingOfHosts`).

    Raises:
        OSError: if a worker could not reach another. All workers raise, and say which ones failed.
        PeerLostError: if a worker ends while links are measured.
    """
    exchanges = all_reduce_exchanges(rank, num_workers) if small_bytes != NOTHING else []
    partners = {each.partner for each in exchanges}
    next_rank = (rank + 1) % num_workers
    connections, hosts = _connections(rank, host, exchange, partners, next_rank, answer_s)
    ends = connections.pop(_NEXT), connections.pop(_PREVIOUS)
    neighbours = Neighbours(
        rank, num_workers, *ends, timeout_s, liveness, tasks, partners=connections, names=names
    )
    small, halved = SMALL_BYTES if small_bytes is None else small_bytes, NOTHING
    if exchanges and len(set(hosts)) in (1, num_workers):  # else ranks would share a link
        halved = most_halved_bytes(num_workers)
    ring = Ring(neighbours, small, halved)
    if small_bytes is None and num_workers == 2:
        ring.measure()
    groups = equal_groups(hosts) if hosts_first else []
    if not groups:
        return ring
    of_host, of_place = _parts_of(rank, groups)
    common = rank, host, exchange, (timeout_s, liveness), tasks, answer_s
    within = _ring_of(of_host, NOTHING, "within hosts", *common)
    across = _ring_of(of_place, SMALL_BYTES, "across hosts", *common)
    return RingOfHosts(neighbours, ring.small_bytes, within, across, groups)


def _connections(
    rank: int,
    host: str,
    exchange: Callable[[str, object], list],
    partners: Collection[int],
    next_rank: int,
    answer_s: float,
) -> tuple[dict[int, socket.socket], list[str]]:
    """By partner, `_NEXT` or `_PREVIOUS`, and the host of each worker. None raises alone."""
    token = secrets.token_hex(_TOKEN_BYTES)
    problem = None
    connections: dict[int, socket.socket] = {}
    expected = {_PREVIOUS, *(each for each in partners if each > rank)}
    with listen(host) as listener:
        addresses = exchange(_OPEN, [host, listener.getsockname()[1], token])
        deadline = time.monotonic() + answer_s
        try:
            with _letting_in(listener, key_of(token), expected, deadline, connections):
                to_next = _connect(next_rank, addresses[next_rank], _PREVIOUS, deadline)
                connections[_NEXT] = to_next
                for partner in sorted(each for each in partners if each < rank):
                    connections[partner] = _connect(partner, addresses[partner], rank, deadline)
        except OSError as error:
            problem = f"rank {rank} at {host}: {error}"
    problems = [each for each in exchange("have opened a ring", problem) if each]
    if problems:
        for connection in connections.values():
            connection.close()
        raise ConnectionError("; ".join(problems))
    for connection in connections.values():
        pace_if_far(connection)
    return connections, [where for where, *_ in addresses]


def _parts_of(rank: int, groups: list[list[int]]) -> tuple[list[int], list[int]]:
    """The ranks of a worker's host, and those that have its place on all hosts."""
    own = next(group for group in groups if rank in group)
    return own, [group[own.index(rank)] for group in groups]


def _ring_of(
    ranks: list[int],
    small_bytes: int,
    what: str,
    rank: int,
    host: str,
    exchange: Callable[[str, object], list],
    limits: tuple[float | None, Liveness | None],
    tasks: Sequence[str],
    answer_s: float,
) -> Ring:
    """As `connect_ring`, between `ranks`, while all others open such rings of their own."""

    def exchange_among(kind: str, value: object) -> list:
        told = exchange(f"{kind} {what}", value)
        return [told[each] for each in ranks] if kind == _OPEN else told  # problems are of all

    place = ranks.index(rank), len(ranks), host, exchange_among
    names_of_tasks = [tasks[each] for each in ranks] if tasks else ()
    return connect_ring(*place, *limits, names_of_tasks, small_bytes, answer_s, names=ranks)


@contextlib.contextmanager
def _letting_in(
    listener: socket.socket,
    key: bytes,
    expected: set[int],
    deadline: float,
    connections: dict[int, socket.socket],
) -> Iterator[None]:
    """Lets guests in while this worker is one itself: all wait for one another's answers."""
    with ThreadPoolExecutor(1) as pool:
        letting_in = pool.submit(_let_in, listener, key, expected, deadline, connections)
        try:
            yield
        except BaseException:
            listener.shutdown(socket.SHUT_RDWR)  # nobody is let in any more
            raise
        letting_in.result()


def _let_in(
    listener: socket.socket,
    key: bytes,
    expected: set[int],
    deadline: float,
    connections: dict[int, socket.socket],
) -> None:
    with Door(listener, key, _GUEST.size) as door:
        while missing := expected - set(connections):
            guest = door.next(deadline - time.monotonic())
            if guest is None:
                names = ["the previous one" if each < 0 else each for each in sorted(missing)]
                raise TimeoutError(
                    f"no rank that knows the token has connected in time, of {names}"
                )
            (who,) = _GUEST.unpack(guest.message)
            if who not in missing:
                guest.close()
                continue
            connections[who] = guest.connection
            guest.answer()


def _connect(rank: int, address: Sequence, guest: int, deadline: float) -> socket.socket:
    """A connection to `rank`, which knows whose it is."""
    host, port, token = address
    whom = f"rank {rank} at {host}:{port}"
    message, look = _GUEST.pack(guest), until(deadline, "it")
    try:
        connection = socket.create_connection((host, port), max(0.01, deadline - time.monotonic()))
    except OSError as error:
        raise ConnectionError(f"{whom}: {error}") from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(connection, key_of(token), message, look)
    except OSError as error:
        connection.close()
        raise ConnectionError(f"{whom}: {error}") from error
    return connection
