"""A worker's two connections in a ring: it sends to the next rank and receives from the previous.

Whoever waits here looks around: at the connection, at who is there (`Liveness`), at the clock.
"""

import contextlib
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.communication.sender import Sender
from tfparallel.coordination.machine import THIS_MACHINE, Machine
from tfparallel.coordination.patience import LONGEST_LOOK_S, Wait, WaitedTooLong
from tfparallel.coordination.waiting import look

_LOOK_S = LONGEST_LOOK_S / 5  # how often one who waits looks whether the others are there
_GREETING = struct.Struct("<Q8sQ8s")  # number and kind of the collective, bytes, dtype


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


class Neighbours:
    """A worker's connections to the next and the previous rank.

    Args:
        rank, num_workers: this worker's position, and how many there are.
        to_next, from_previous: connected stream sockets, which `close` closes.
        timeout_s: how long to wait for a neighbour that is there; None waits for ever.
        liveness: asked while waiting: a connection to a process that is stopped does not break.
        tasks: the name of each rank's task, for messages.
        machine: what it runs on.
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
        machine: Machine = THIS_MACHINE,
    ):
        self._machine = machine
        self.rank, self.num_workers, self._tasks = rank, num_workers, tasks
        self._next, self._previous = (rank + 1) % num_workers, (rank - 1) % num_workers
        self._from_previous = from_previous
        self._timeout_s, self._liveness = timeout_s, liveness
        self._spent_s = self._waited_s = 0.0  # in collectives
        self._what = ""
        self._journal: LinkJournal | None = None
        self._wait: Wait | None = None  # for the neighbour, while nothing comes
        for each in (to_next, from_previous):
            _return_every(each, _LOOK_S if timeout_s is None else min(_LOOK_S, timeout_s / 2))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sender = Sender(to_next, machine)
        self._number = 0
        self.close = weakref.finalize(self, _close, self._sender, to_next, from_previous)

    @property
    def bytes_sent(self) -> int:
        """What has been given to the connection since it was opened."""
        return self._sender.bytes_sent

    @property
    def times(self) -> LinkTimes:
        """What collectives have taken since the connection was opened."""
        return LinkTimes(self._spent_s, self._waited_s, self.bytes_sent)

    @contextlib.contextmanager
    def journal(self) -> Iterator[LinkJournal]:
        """Within it, what this worker sends and receives is noted."""
        self._journal = self._sender.journal = LinkJournal(self._machine.now_s)
        try:
            yield self._journal
        finally:
            self._journal = self._sender.journal = None

    def put(self, array: np.ndarray) -> None:
        """Sends `array` to the next rank in the background; it must not change until `flush`."""
        self._sender.put(array)

    def greet(self, kind: str, size_bytes: int, dtype: np.dtype) -> None:
        """Makes sure that the previous worker is about to do the same."""
        self._number += 1
        ours = (self._number, kind.encode(), size_bytes, dtype.name[:8].encode())
        self._what = f"come to {_describe(ours)}"
        self.send_at_once(np.frombuffer(_GREETING.pack(*ours), np.uint8))
        greeting = np.empty(_GREETING.size, np.uint8)
        came = self._machine.now_s()
        self.receive(greeting)
        self._waited_s += self._machine.now_s() - came
        number, their_kind, their_bytes, their_dtype = _GREETING.unpack(greeting.tobytes())
        theirs = (number, their_kind.rstrip(b"\0"), their_bytes, their_dtype.rstrip(b"\0"))
        if theirs != ours:
            raise CollectiveMismatchError(
                "All workers must run the same steps on the same model. Received: rank "
                f"{self._previous} is in {_describe(theirs)}, rank {self.rank} in "
                f"{_describe(ours)}. (Rank {self.rank} is speaking.)"
            )

    def _described(self, rank: int) -> str:
        """A rank as messages name it: "Rank 1 (/job:worker/task:0)"."""
        return f"Rank {rank} ({self._tasks[rank]})" if self._tasks else f"Rank {rank}"

    def receive(self, array: np.ndarray) -> None:
        """Fills `array` with what the previous rank sends."""
        began_s, view = self._machine.now_s(), array.view(np.uint8).data
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
        if self._journal is not None:
            self._journal.note("receive", began_s)

    def send_at_once(self, array: np.ndarray) -> None:
        """Sends a small `array` to the next rank in the calling thread; nothing may be waiting."""
        self._sender.send_at_once(array, lambda: self._look(self._next))

    def flush(self) -> None:
        """Waits until all that was put is sent."""
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
            speaker, option = f"rank {self.rank}", "A longer stall_s"
            self._wait = Wait(speaker, self._what, self._timeout_s, self._machine.now_s(), option)
        try:
            look(self._wait, f"rank {neighbour}, or one that it waits for,", self._machine)
        except WaitedTooLong as error:
            raise _Silent(
                f"Rank {neighbour}, or one that it waits for, is stuck: silent for "
                f"{self._timeout_s:g} s, though all workers answer"
            ) from error

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Closes the ring when anything fails, so that the neighbours do not wait for this one."""
        began = self._machine.now_s()
        try:
            yield
            self._spent_s += self._machine.now_s() - began
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
                f"{what}, in a collective. (Rank {self.rank} is speaking.)"
            ) from error
        except BaseException:
            self.close()
            raise


def _return_every(connection: socket.socket, seconds: float) -> None:
    """Lets a blocking send or receive raise BlockingIOError after so long, to look around.

    Unlike Python's own timeout, which asks the system before every call, it costs nothing.
    """
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def _close(sender: Sender, *connections: socket.socket) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # not connected any more
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    sender.stop()


def _describe(greeting: tuple[int, bytes, int, bytes]) -> str:
    number, kind, size_bytes, dtype = greeting
    size = f"rows of {size_bytes} bytes" if kind == b"gather" else f"{size_bytes} bytes"
    name = {b"scatter": "reduce-scatter", b"gathers": "all-gather"}.get(
        kind, f"all-{kind.decode()}"
    )
    return f"{name} {number} of {size} of {dtype.decode()}"
