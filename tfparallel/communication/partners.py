"""A worker's two-way connections to the ranks that it exchanges whole small arrays with.

Both sides send and receive in one thread: a message that goes to a thread of its own, as the ring's
do, takes longer to get there than over the wire.
"""

import socket
from collections.abc import Callable, Mapping

import numpy as np

from tfparallel.communication.link_journal import LinkJournal
from tfparallel.coordination.machine import Machine


class Partners:
    """Connections by rank.

    Args:
        connections: connected stream sockets that raise BlockingIOError now and then, for
            a look around.
        look: called with a rank whenever it has let this worker wait so long.
        machine: what it runs on.

    Attributes:
        bytes_sent: over all connections.
        failed: the rank to which the connection has failed, if any has.
        journal: of what is sent and received, while somebody wants to know.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        look: Callable[[int], None],
        machine: Machine,
    ):
        self._connections, self._look, self._machine = connections, look, machine
        self.bytes_sent = 0
        self.failed: int | None = None
        self.journal: LinkJournal | None = None

    def exchange(
        self,
        rank: int,
        outgoing: np.ndarray | None,
        incoming: np.ndarray | None,
        check: Callable[[bytes], None],
        head_bytes: int,
    ) -> None:
        """Sends bytes to `rank` and receives bytes of it at the same time; either may be missing.

        Args:
            rank: of the partner, which does the same at the other end.
            outgoing, incoming: uint8; what is received fills `incoming`.
            check: called with the first `head_bytes` of it, as soon as they are there.
            head_bytes: how many.
        """
        began_s, connection = self._machine.now_s(), self._connections[rank]
        out = memoryview(b"") if outgoing is None else outgoing.data
        into = memoryview(b"") if incoming is None else incoming.data
        is_checked = incoming is None
        self.bytes_sent += len(out)
        try:
            while out or into:
                # Blocks in one of the two only: if nothing more can be sent, something is under
                # way to the partner, who reads it and then sends, or has sent.
                if out:
                    out = out[self._send(connection, rank, out, waits=not into) :]
                if into:
                    into = into[self._receive(connection, rank, into) :]
                if incoming is not None and not is_checked:
                    is_checked = incoming.nbytes - len(into) >= head_bytes
                    if is_checked:
                        check(incoming[:head_bytes].tobytes())
        except OSError:
            self.failed = rank
            raise
        if self.journal is not None:
            self.journal.note("send" if incoming is None else "receive", began_s)

    def _send(self, connection: socket.socket, rank: int, view: memoryview, waits: bool) -> int:
        try:
            return connection.send(view, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if waits:
                self._look(rank)
            return 0

    def _receive(self, connection: socket.socket, rank: int, view: memoryview) -> int:
        try:
            received = connection.recv_into(view)
        except BlockingIOError:
            self._look(rank)
            return 0
        if not received:
            raise ConnectionResetError("closed by the other side")
        return received
