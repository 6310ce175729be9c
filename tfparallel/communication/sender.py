"""Sends arrays over a socket in a thread of its own."""

import collections
import socket
from collections.abc import Callable

import numpy as np

from tfparallel.communication.link_journal import LinkJournal
from tfparallel.coordination.machine import Machine


class Sender:
    """Sends arrays in a thread of its own: a worker sends and receives at the same time."""

    def __init__(self, connection: socket.socket, machine: Machine):
        self._connection, self._machine = connection, machine
        self.journal: LinkJournal | None = None
        self._changed = machine.changes()  # guards what follows
        self._arrays: collections.deque[np.ndarray | None] = collections.deque()
        self._num_left = 0  # arrays that are not sent yet
        self._error: list[OSError] = []
        self.bytes_sent = 0
        machine.start(self._send_all, "tfparallel-ring")

    @property
    def has_failed(self) -> bool:
        return bool(self._error)

    def put(self, array: np.ndarray) -> None:
        """Sends `array` after all that was put before; it must not change until `flush`."""
        self.bytes_sent += array.nbytes
        self._put(array)

    def send_at_once(self, array: np.ndarray, look: Callable[[], None]) -> None:
        """Sends a small `array` in the calling thread; nothing may be waiting."""
        self.bytes_sent += array.nbytes
        try:
            self._send(array, look)
        except OSError as error:
            self._error.append(error)
            raise

    def is_done_in(self, seconds: float) -> bool:
        """Waits so long until everything is sent, and raises what has gone wrong."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._num_left, seconds)
        if self._error:
            raise self._error[0]
        return is_done

    def stop(self) -> None:
        """Ends the thread."""
        self._put(None)

    def _put(self, array: np.ndarray | None) -> None:
        with self._changed:
            self._arrays.append(array)
            self._num_left += 1
            self._changed.notify_all()

    def _next(self) -> np.ndarray | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._arrays))
            return self._arrays.popleft()

    def _send(self, array: np.ndarray, look: Callable[[], None]) -> None:
        began_s, journal = self._machine.now_s(), self.journal
        _send(self._connection, array, look)
        if journal is not None:
            journal.note("send", began_s)

    def _send_all(self) -> None:
        while (array := self._next()) is not None:
            try:
                if not self._error:
                    # Who reads what comes back looks for us: the ring is closed, which raises here.
                    self._send(array, lambda: None)
            except OSError as error:
                self._error.append(error)
            finally:
                with self._changed:
                    self._num_left -= 1
                    self._changed.notify_all()


def _send(connection: socket.socket, array: np.ndarray, look: Callable[[], None]) -> None:
    """`sendall` that looks around while nothing can be sent."""
    view = array.view(np.uint8).data
    while view:
        try:
            view = view[connection.send(view) :]
        except BlockingIOError:
            look()
