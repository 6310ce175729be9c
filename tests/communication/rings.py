"""Rings of threads of this process, over real sockets."""

import threading
from concurrent.futures import ThreadPoolExecutor

from tfparallel.communication.ring import Ring
from tfparallel.communication.ring_opening import connect_ring


class Board:
    """`Agreement.exchange` between threads."""

    def __init__(self, num_workers: int):
        self._barrier = threading.Barrier(num_workers)
        self._values = [None] * num_workers

    def of(self, rank: int):
        def exchange(kind, value):
            self._values[rank] = value
            self._barrier.wait(10)
            values = list(self._values)
            self._barrier.wait(10)
            return values

        return exchange


def on_all(num_workers: int, function) -> list:
    """What `function(rank)` returns, or raises, in one thread for each rank."""

    def call(rank):
        try:
            return function(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(call, range(num_workers)))


TASKS = ["/job:chief/task:0", *(f"/job:worker/task:{i}" for i in range(8))]


AROUND, AMONG_PARTNERS = -1, 1 << 14  # up to so many bytes are small


def connect_all(
    num_workers: int,
    timeout_s: float | None = 10.0,
    host="127.0.0.1",
    small_bytes: int | None = AMONG_PARTNERS,
    answer_s: float = 30.0,
    names=(),
    hosts=(),
) -> list[Ring]:
    """Rings of threads, on `host`, or on the host of each rank in `hosts`, hosts first."""
    board = Board(num_workers)

    def connect(rank):
        exchange = board.of(rank)
        return connect_ring(
            rank,
            num_workers,
            hosts[rank] if hosts else host,
            exchange,
            timeout_s,
            tasks=TASKS,
            small_bytes=small_bytes,
            answer_s=answer_s,
            names=names,
            hosts_first=bool(hosts),
        )

    return on_all(num_workers, connect)


def hosts_of(num_hosts: int, num_ranks: int) -> list[str]:
    """Addresses of this machine, as of hosts, for `num_ranks` ranks on each, in turns."""
    return [f"127.0.0.{1 + i}" for i in range(num_hosts)] * num_ranks
