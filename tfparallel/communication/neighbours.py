"""A worker's connections in a ring: it sends to the next rank and receives from the previous.

Over more of them, to `Partners`, small arrays take a shorter way. Whoever waits here looks around:
at the connection, at who is there (`Liveness`), at the clock.
"""

import contextlib
import functools
import socket
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.communication.partners import Partners
from tfparallel.communication.sender import Sender
from tfparallel.coordination.machine import THIS_MACHINE, Machine
from tfparallel.coordination.patience import LONGEST_LOOK_S, Wait, WaitedTooLong
from tfparallel.coordination.waiting import look

_LOOK_S = LONGEST_LOOK_S / 5  # how often one who waits looks whether the others are there
_GREETING = struct.Struct("<Q8sQ8s")  # number and kind of the collective, bytes, dtype
GREETING_BYTES = _GREETING.size


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
        partners: connected stream sockets, by rank, to those of `doubling.all_reduce_exchanges`,
            which `close` closes, too; none if nothing is small.
        names: the rank of each position among all workers, for messages, where a ring is of some of
            them.
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
        partners: Mapping[int, socket.socket] | None = None,
        names: Sequence[int] = (),
    ):
        self.machine = machine
        self.rank, self.num_workers, self._tasks = rank, num_workers, tasks
        self.names = tuple(names) or tuple(range(num_workers))
        self._next, self._previous = (rank + 1) % num_workers, (rank - 1) % num_workers
        self._from_previous = from_previous
        self._timeout_s, self._liveness = timeout_s, liveness
        self._spent_s = self._waited_s = 0.0  # in collectives
        self._what = ""
        self._ours: tuple[int, bytes, int, bytes] = (0, b"", 0, b"")  # this worker's collective
        self._is_apart = False  # whether it is one among partners
        self._journal: LinkJournal | None = None
        self._wait: Wait | None = None  # for the neighbour, while nothing comes
        connections = [to_next, from_previous, *(partners or {}).values()]
        for each in connections:
            _return_every(each, _LOOK_S if timeout_s is None else min(_LOOK_S, timeout_s / 2))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sender = Sender(to_next, machine)
        look = weakref.WeakMethod(self._look)  # no circle: `close` is called when nobody holds this
        self._partners = Partners(partners or {}, lambda rank: _called(look, rank), machine)
        self.close = weakref.finalize(self, _close, self._sender, *connections)

    @property
    def bytes_sent(self) -> int:
        """What has been given to the connections since they were opened."""
        return self._sender.bytes_sent + self._partners.bytes_sent

    @property
    def times(self) -> LinkTimes:
        """What collectives have taken since the connections were opened."""
        return LinkTimes(self._spent_s, self._waited_s, self.bytes_sent)

    @contextlib.contextmanager
    def journal(self, journal: LinkJournal | None = None) -> Iterator[LinkJournal]:
        """Within it, what this worker sends and receives is noted, in `journal` or a new one."""
        journal = journal or LinkJournal(self.machine.now_s)
        self._journal = self._sender.journal = self._partners.journal = journal
        try:
            yield journal
        finally:
            self._journal = self._sender.journal = self._partners.journal = None

    def put(self, array: np.ndarray) -> None:
        """Sends `array` to the next rank in the background; it must not change until `flush`."""
        self._sender.put(array)

    def greet(self, kind: str, size_bytes: int, dtype: np.dtype) -> None:
        """Makes sure that the previous worker is about to do the same."""
        self.send_at_once(self._begin(kind, size_bytes, dtype))
        self._is_apart = False
        greeting = np.empty(_GREETING.size, np.uint8)
        came = self.machine.now_s()
        self.receive(greeting)
        self._waited_s += self.machine.now_s() - came
        self._check(self._previous, greeting.tobytes())

    def greet_partners(self, kind: str, size_bytes: int, dtype: np.dtype) -> np.ndarray:
        """What every message to a partner begins with: `[GREETING_BYTES]`, uint8."""
        self._is_apart = True
        return self._begin(kind, size_bytes, dtype)

    def exchange(
        self, partner: int, outgoing: np.ndarray | None, incoming: np.ndarray | None, is_first: bool
    ) -> None:
        """Sends and receives bytes that begin with a greeting, as `Partners.exchange`.

        Args:
            partner, outgoing, incoming: as there.
            is_first: of a collective: what it takes is time that the partner came later.
        """
        came = self.machine.now_s()
        check = functools.partial(self._check, partner)
        self._partners.exchange(partner, outgoing, incoming, check, GREETING_BYTES)
        self._wait = None
        if is_first:
            self._waited_s += self.machine.now_s() - came

    def _begin(self, kind: str, size_bytes: int, dtype: np.dtype) -> np.ndarray:
        self._ours = (self._ours[0] + 1, kind.encode(), size_bytes, dtype.name[:8].encode())
        self._what = f"come to {_describe(self._ours)}"
        return np.frombuffer(_GREETING.pack(*self._ours), np.uint8)

    def _check(self, rank: int, greeting: bytes) -> None:
        """Raises CollectiveMismatchError if `rank` is in another collective than this worker."""
        theirs = _unpacked(greeting)
        if theirs != self._ours:
            if self._is_apart:
                self._tell_next()
            raise self._mismatch(rank, theirs)

    def _mismatch(self, rank: int, theirs: tuple[int, bytes, int, bytes]) -> Exception:
        return CollectiveMismatchError(
            f"All workers must run the same steps on the same model. Received: rank "
            f"{self.names[rank]} is in {_describe(theirs)}, rank {self.names[self.rank]} in "
            f"{_describe(self._ours)}. (Rank {self.names[self.rank]} "
            "is speaking.)"
        )

    def _tell_next(self) -> None:
        """Says over the ring where this worker is, to one who may be in a collective of the ring.

        Else the next one would only see that this one has gone.
        """
        with contextlib.suppress(OSError):  # the next one may have gone before
            self._sender.send_at_once(
                np.frombuffer(_GREETING.pack(*self._ours), np.uint8), lambda: None
            )

    def _is_previous_elsewhere(self) -> Exception | None:
        """The error of a worker among partners, while the previous one has greeted in the ring.

        What it says of a later collective is for later: it may be there already.
        """
        greeting = bytearray(_GREETING.size)
        try:
            peeked = self._from_previous.recv_into(
                greeting, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
        except OSError:  # nothing there, or closed
            return None
        theirs = _unpacked(bytes(greeting))
        if peeked < _GREETING.size or theirs[0] != self._ours[0] or theirs == self._ours:
            return None
        self._tell_next()
        return self._mismatch(self._previous, theirs)

    def _described(self, rank: int) -> str:
        """A rank as messages name it: "Rank 1 (/job:worker/task:0)"."""
        named = f"Rank {self.names[rank]}"
        return f"{named} ({self._tasks[rank]})" if self._tasks else named

    def receive(self, array: np.ndarray) -> None:
        """Fills `array` with what the previous rank sends."""
        began_s, view = self.machine.now_s(), array.view(np.uint8).data
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
            CollectiveMismatchError: if the previous worker is in another collective.
        """
        if self._is_apart and (elsewhere := self._is_previous_elsewhere()):
            raise elsewhere
        if self._liveness is not None and (lost := self._liveness.lost()):
            raise _Silent(
                f"No answer from {', '.join(lost)} for {self._liveness.patience_s:g} s: stopped, "
                "or cut off"
            )
        if self._wait is None:
            speaker, option = f"rank {self.names[self.rank]}", "A longer stall_s"
            self._wait = Wait(speaker, self._what, self._timeout_s, self.machine.now_s(), option)
        try:
            whom = f"rank {self.names[neighbour]}, or one that it waits for,"
            look(self._wait, whom, self.machine)
        except WaitedTooLong as error:
            raise _Silent(
                f"Rank {self.names[neighbour]}, or one that it waits for, is stuck: silent for "
                f"{self._timeout_s:g} s, though all workers answer"
            ) from error

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Closes the ring when anything fails, so that the neighbours do not wait for this one."""
        began = self.machine.now_s()
        try:
            yield
            self._spent_s += self.machine.now_s() - began
        except PeerLostError:  # of a ring that is a part of this one
            self.close()
            raise
        except OSError as error:
            reason = self._is_previous_elsewhere() if self._is_apart else None
            reason = reason or self._peer_lost(error)
            self.close()
            raise reason from error
        except BaseException:
            self.close()
            raise

    def _peer_lost(self, error: OSError) -> PeerLostError:
        lost = self._next if self._sender.has_failed else self._previous
        lost = lost if self._partners.failed is None else self._partners.failed
        absent = self._liveness.absent() if self._liveness is not None else []
        what = f"{self._described(lost)} has ended, its own log says why: {error}"
        if isinstance(error, _Silent):
            what = str(error)
        elif absent:  # the neighbour may have ended because of another
            what = f"{', '.join(absent)} has ended, its own log says why: {error}"
        return PeerLostError(
            f"{what}, in a collective. (Rank {self.names[self.rank]} is speaking.)"
        )


def _called(method: weakref.WeakMethod, rank: int) -> None:
    if (look := method()) is not None:
        look(rank)


def _unpacked(greeting: bytes) -> tuple[int, bytes, int, bytes]:
    number, kind, size_bytes, dtype = _GREETING.unpack(greeting)
    return number, kind.rstrip(b"\0"), size_bytes, dtype.rstrip(b"\0")


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
