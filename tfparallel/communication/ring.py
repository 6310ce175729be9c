"""Ring all-reduce and all-gather of host memory over TCP, between the workers of one job.

Rank r sends to rank r + 1 only. Cut into as many chunks as there are workers, an array goes
round twice: once being summed, once being handed out. Each worker sends and receives
`2 (N - 1) / N` times the array's bytes, however many workers there are.

    step         0          1        ...   N - 2     |   N - 1     ...
    rank r    sends r    sends r-1   ...             |   sends r+1 ...
              adds r-1   adds r-2    ...  adds r+1   |   receives r ...

A chunk is sent on in segments while the rest of it is still coming in.

TensorFlow's own collectives on CPUs do the same over gRPC, at a quarter of the speed
(docs/performance.md): every hop is serialised into messages and copied several times.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009; Gibiansky, "Bringing HPC techniques to deep learning", 2017.
"""

import contextlib
import math
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from tfparallel.coordination.listening import accept_known, listen
from tfparallel.coordination.patience import LONGEST_LOOK_S, Wait, WaitedTooLong
from tfparallel.coordination.waiting import look

SEGMENT_BYTES = 1 << 19  # stays in a core's cache between receiving, adding and sending
# Up to here an array fits into the sockets' buffers: it is sent at once, no thread has to wake up.
_SENT_AT_ONCE_BYTES = 1 << 14
_CONNECT_TIMEOUT_S = 30.0
_TOKEN_BYTES = 16
_LOOK_S = LONGEST_LOOK_S / 5  # how often one who waits looks whether the others are there
_GREETING = struct.Struct("<Q8sQ8s")  # number and kind of the collective, bytes, dtype
_NUM_ROWS = struct.Struct("<Q")


class PeerLostError(ConnectionError):
    """A worker of the ring has ended, or has been silent for too long."""


class Liveness(Protocol):
    """Who of the others is there; `coordination.watch.Watch` is one."""

    @property
    def patience_s(self) -> float:
        """How long one may be silent."""

    def lost(self) -> list[str]:
        """Those that have not answered for `patience_s`, with their addresses."""

    def absent(self) -> list[str]:
        """Those that do not answer now."""


class _Silent(TimeoutError):
    """Somebody does not answer, or nothing has come for too long."""


class CollectiveMismatchError(RuntimeError):
    """Neighbours are in different collectives: the workers do not run the same program."""


class Ring:
    """One worker's place in the ring.

    Args:
        rank, num_workers: this worker's position, and how many there are.
        to_next, from_previous: connected stream sockets; the ring closes them.
        timeout_s: how long to wait for a neighbour that is there; None waits for ever.
        liveness: asked while waiting: a connection to a process that is stopped does not break.
        tasks: the name of each rank's task, for messages.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        to_next: socket.socket,
        from_previous: socket.socket,
        timeout_s: float | None = 1800.0,
        liveness: Liveness | None = None,
        tasks: Sequence[str] = (),
    ):
        self._rank, self._num_workers, self._tasks = rank, num_workers, tasks
        self._next, self._previous = (rank + 1) % num_workers, (rank - 1) % num_workers
        self._from_previous, self._to_next = from_previous, to_next
        self._timeout_s, self._liveness = timeout_s, liveness
        self._what = ""
        self._wait: Wait | None = None  # for the neighbour, while nothing comes
        for each in (to_next, from_previous):
            _return_every(each, _LOOK_S if timeout_s is None else min(_LOOK_S, timeout_s / 2))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sender = _Sender(to_next)
        self._scratch = bytearray(SEGMENT_BYTES)
        self._lock = threading.Lock()
        self._number = 0
        self.close = weakref.finalize(self, _close, self._sender, to_next, from_previous)

    @property
    def bytes_sent(self) -> int:
        """What this worker has given to its connection since the ring was opened."""
        return self._sender.bytes_sent

    def all_reduce(self, array: np.ndarray) -> np.ndarray:
        """The sum of all workers' arrays; every worker receives the same bits.

        Every worker calls it, in the same order, with one shape and dtype.

        Raises:
            PeerLostError: if a neighbour ends, or says nothing for `timeout_s`. The ring is closed.
            CollectiveMismatchError: if the previous worker is in another collective. Likewise.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        total = np.empty_like(flat)
        with self._lock, self._closed_on_error():
            send = self._sender.put
            if flat.nbytes <= _SENT_AT_ONCE_BYTES:
                send = self._send_at_once
            self._greet("reduce", flat.nbytes, flat.dtype)
            for segment in self._segments(flat, self._rank):
                send(flat[segment])
            for step in range(self._num_workers - 1):
                for segment in self._segments(flat, self._rank - step - 1):
                    received = self._scratch_for(flat[segment])
                    self._receive(received)
                    np.add(flat[segment], received, out=total[segment])
                    send(total[segment])
            for step in range(self._num_workers - 1):
                for segment in self._segments(flat, self._rank - step):
                    self._receive(total[segment])
                    if step < self._num_workers - 2:
                        send(total[segment])
            self._flush()  # whoever reads `total` may also overwrite it
        return total.reshape(array.shape)

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        """This worker's row of the sum of all workers' arrays, `[num_workers, ...]`.

        The first half of `all_reduce`, of half its bytes; the sum goes on around the ring until it
        is where it belongs. Every worker calls it, in the same order, with one shape and dtype.

        Raises:
            ValueError: if `array` does not have a row for each worker.
            as `all_reduce`.
        """
        if not array.shape or array.shape[0] != self._num_workers:
            raise ValueError(
                f"reduce_scatter needs a row for each of {self._num_workers} workers. Received: "
                f"shape {array.shape}. (Rank {self._rank} is speaking.)"
            )
        rows = np.ascontiguousarray(array).reshape(self._num_workers, -1)
        length = SEGMENT_BYTES // rows.itemsize
        segments = [slice(i, i + length) for i in range(0, rows.shape[1], length)]
        total = np.empty_like(rows[0])
        with self._lock, self._closed_on_error():
            self._greet("scatter", rows.nbytes, rows.dtype)
            for segment in segments:
                self._sender.put(rows[self._previous, segment])
            for step in range(self._num_workers - 1):
                own = rows[(self._rank - step - 2) % self._num_workers]
                partial = total if step == self._num_workers - 2 else np.empty_like(total)
                for segment in segments:
                    received = self._scratch_for(own[segment])
                    self._receive(received)
                    np.add(own[segment], received, out=partial[segment])
                    if partial is not total:
                        self._sender.put(partial[segment])
            self._flush()
        return (rows[0] if self._num_workers == 1 else total).reshape(array.shape[1:])

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """The rows of all workers' arrays, in the order of ranks.

        Every worker calls it, in the same order, with `[rows, ...]` of one dtype; only the number
        of rows may differ. `all_gather(x[np.newaxis])` of equal shapes is `[num_workers, ...]`.
        Each worker sends what it has and passes on what it receives, `N - 1` times.

        Raises:
            as `all_reduce`.
        """
        array = np.ascontiguousarray(array)
        row_bytes = array.itemsize * math.prod(array.shape[1:])
        parts = {self._rank: array}
        with self._lock, self._closed_on_error():
            self._greet("gather", row_bytes, array.dtype)
            for step in range(self._num_workers - 1):
                outgoing = parts[(self._rank - step) % self._num_workers]
                self._sender.put(np.frombuffer(_NUM_ROWS.pack(len(outgoing)), np.uint8))
                self._sender.put(outgoing.reshape(-1))
                num_rows = np.empty(_NUM_ROWS.size, np.uint8)
                self._receive(num_rows)
                shape = (*_NUM_ROWS.unpack(num_rows.tobytes()), *array.shape[1:])
                incoming = np.empty(shape, array.dtype)
                self._receive(incoming.reshape(-1))
                parts[(self._rank - step - 1) % self._num_workers] = incoming
            self._flush()
        return np.concatenate([parts[rank] for rank in range(self._num_workers)])

    def _segments(self, flat: np.ndarray, chunk: int) -> Iterator[slice]:
        """The pieces of chunk number `chunk`, modulo the number of workers."""
        chunk %= self._num_workers
        begin = flat.size * chunk // self._num_workers
        end = flat.size * (chunk + 1) // self._num_workers
        length = SEGMENT_BYTES // flat.itemsize
        for start in range(begin, end, length):
            yield slice(start, min(start + length, end))

    def _scratch_for(self, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(self._scratch, like.dtype, like.size)

    def _greet(self, kind: str, size_bytes: int, dtype: np.dtype) -> None:
        """Makes sure that the previous worker is about to do the same."""
        self._number += 1
        ours = (self._number, kind.encode(), size_bytes, dtype.name[:8].encode())
        self._what = f"come to {_describe(ours)}"
        self._send_at_once(np.frombuffer(_GREETING.pack(*ours), np.uint8))
        greeting = np.empty(_GREETING.size, np.uint8)
        self._receive(greeting)
        number, their_kind, their_bytes, their_dtype = _GREETING.unpack(greeting.tobytes())
        theirs = (number, their_kind.rstrip(b"\0"), their_bytes, their_dtype.rstrip(b"\0"))
        if theirs != ours:
            raise CollectiveMismatchError(
                "All workers must run the same steps on the same model. Received: rank "
                f"{self._previous} is in {_describe(theirs)}, rank {self._rank} in "
                f"{_describe(ours)}. (Rank {self._rank} is speaking.)"
            )

    def _described(self, rank: int) -> str:
        """A rank as messages name it: "Rank 1 (/job:worker/task:0)"."""
        return f"Rank {rank} ({self._tasks[rank]})" if self._tasks else f"Rank {rank}"

    def _receive(self, array: np.ndarray) -> None:
        view = array.view(np.uint8).data
        while view:
            try:
                received = self._from_previous.recv_into(view)
            except BlockingIOError:
                self._look(self._previous)
                continue
            if not received:
                raise ConnectionResetError("closed by the other side")
            view = view[received:]
            self._wait = None

    def _send_at_once(self, array: np.ndarray) -> None:
        self._sender.send_at_once(array, lambda: self._look(self._next))

    def _flush(self) -> None:
        while not self._sender.is_done_in(_LOOK_S):
            self._look(self._next)
        self._wait = None

    def _look(self, neighbour: int) -> None:
        """Called again and again while `neighbour` lets this worker wait.

        Raises:
            _Silent: if a worker does not answer any more, or all do and it has taken too long.
        """
        if self._liveness is not None and (lost := self._liveness.lost()):
            raise _Silent(
                f"No answer from {', '.join(lost)} for {self._liveness.patience_s:g} s: stopped, "
                "or cut off"
            )
        if self._wait is None:
            speaker, option = f"rank {self._rank}", "A longer stall_s"
            self._wait = Wait(speaker, self._what, self._timeout_s, time.monotonic(), option)
        try:
            look(self._wait, f"rank {neighbour}, or one that it waits for,")
        except WaitedTooLong as error:
            raise _Silent(
                f"Rank {neighbour}, or one that it waits for, is stuck: silent for "
                f"{self._timeout_s:g} s, though all workers answer"
            ) from error

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Closes the ring when anything fails, so that the neighbours do not wait for this one."""
        try:
            yield
        except OSError as error:
            lost = self._next if self._sender.has_failed else self._previous
            absent = self._liveness.absent() if self._liveness is not None else []
            self.close()
            what = f"{self._described(lost)} has ended, its own log says why: {error}"
            if isinstance(error, _Silent):
                what = str(error)
            elif absent:  # the neighbour may have ended because of another
                what = f"{', '.join(absent)} has ended, its own log says why: {error}"
            raise PeerLostError(
                f"{what}, in a collective. (Rank {self._rank} is speaking.)"
            ) from error
        except BaseException:
            self.close()
            raise


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
        timeout_s, liveness, tasks: see `Ring`.

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
    return Ring(rank, num_workers, to_next, from_previous, timeout_s, liveness, tasks)


def _connect(host: str, port: int, token: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token)
    return connection


class _Sender:
    """Sends arrays in a thread of its own: a worker sends and receives at the same time."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._arrays: queue.Queue = queue.Queue()
        self._error: list[OSError] = []
        self.bytes_sent = 0
        threading.Thread(
            target=_send_all, args=(connection, self._arrays, self._error), daemon=True
        ).start()

    @property
    def has_failed(self) -> bool:
        return bool(self._error)

    def put(self, array: np.ndarray) -> None:
        """Sends `array` after all that was put before; it must not change until `flush`."""
        self.bytes_sent += array.nbytes
        self._arrays.put(array)

    def send_at_once(self, array: np.ndarray, look: Callable[[], None]) -> None:
        """Sends a small `array` in the calling thread; nothing may be waiting."""
        self.bytes_sent += array.nbytes
        try:
            _send(self._connection, array, look)
        except OSError as error:
            self._error.append(error)
            raise

    def is_done_in(self, seconds: float) -> bool:
        """Waits so long until everything is sent, and raises what has gone wrong."""
        done = self._arrays.all_tasks_done
        with done:
            is_done = done.wait_for(lambda: not self._arrays.unfinished_tasks, seconds)
        if self._error:
            raise self._error[0]
        return is_done

    def stop(self) -> None:
        """Ends the thread."""
        self._arrays.put(None)


def _send_all(connection: socket.socket, arrays: queue.Queue, errors: list[OSError]) -> None:
    while (array := arrays.get()) is not None:
        try:
            if not errors:
                # Who reads what comes back looks for us: the ring is closed, which raises here.
                _send(connection, array, lambda: None)
        except OSError as error:
            errors.append(error)
        finally:
            arrays.task_done()


def _return_every(connection: socket.socket, seconds: float) -> None:
    """Lets a blocking send or receive raise BlockingIOError after so long, to look around.

    Unlike Python's own timeout, which asks the system before every call, it costs nothing.
    """
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def _send(connection: socket.socket, array: np.ndarray, look: Callable[[], None]) -> None:
    """`sendall` that looks around while nothing can be sent."""
    view = array.view(np.uint8).data
    while view:
        try:
            view = view[connection.send(view) :]
        except BlockingIOError:
            look()


def _close(sender: _Sender, *connections: socket.socket) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # not connected any more
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    sender.stop()


def _describe(greeting: tuple[int, bytes, int, bytes]) -> str:
    number, kind, size_bytes, dtype = greeting
    size = f"rows of {size_bytes} bytes" if kind == b"gather" else f"{size_bytes} bytes"
    name = "reduce-scatter" if kind == b"scatter" else f"all-{kind.decode()}"
    return f"{name} {number} of {size} of {dtype.decode()}"
