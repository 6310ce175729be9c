"""Sends arrays over a socket in a thread of its own."""

import queue
import socket
import threading
from collections.abc import Callable

import numpy as np


class Sender:
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


def _send(connection: socket.socket, array: np.ndarray, look: Callable[[], None]) -> None:
    """`sendall` that looks around while nothing can be sent."""
    view = array.view(np.uint8).data
    while view:
        try:
            view = view[connection.send(view) :]
        except BlockingIOError:
            look()
