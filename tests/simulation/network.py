"""A network of the simulated world: bytes are late and in pieces, connections break or go silent.

As TCP does it: what arrives is in order and whole. A connection to a process that was killed is
reset; one to a process that is stopped, or cut off, says nothing.
"""

import errno
import socket
import struct
from typing import Any

from tests.simulation.world import Process, World

_BUFFER_BYTES = 1500  # much less than any system has
_DELAYS_S = (0.0, 0.001, 0.01, 0.2)


class _Pipe:
    """One direction of a connection."""

    def __init__(self) -> None:
        self.arriving: list[tuple[float, bytes]] = []  # when, and what
        self.is_closed = self.is_reset = False

    def size(self) -> int:
        return sum(len(data) for _, data in self.arriving)

    def has_arrived(self, now_s: float) -> bool:
        return self.is_reset or (bool(self.arriving) and self.arriving[0][0] <= now_s)


class Network:
    """Connects processes.

    Args:
        world: where.

    Attributes:
        cut: processes that nothing reaches any more.
    """

    def __init__(self, world: World):
        self.world = world
        self.cut: set[Process] = set()

    def connected(self, one: Process, other: Process) -> "tuple[SimulatedSocket, SimulatedSocket]":
        """The two ends of a connection."""
        there, back = _Pipe(), _Pipe()
        for process in (one, other):
            process.at_end.append(lambda: self._reset(there, back))
        return (
            SimulatedSocket(self, one, other, there, back),
            SimulatedSocket(self, other, one, back, there),
        )

    def _reset(self, *pipes: _Pipe) -> None:
        for pipe in pipes:
            pipe.is_closed = True

    def are_apart(self, one: Process, other: Process) -> bool:
        """Whether nothing comes through between them."""
        return one in self.cut or other in self.cut

    def is_answering(self, asker: Process, asked: Process) -> bool:
        """What a probe finds."""
        self.world.request()
        is_running = not asked.is_over and self.world.now_s >= asked.stopped_until_s
        return is_running and not self.are_apart(asker, asked)


class SimulatedSocket:
    """The methods of `socket.socket` that are used of a connected one."""

    def __init__(
        self, network: Network, own: Process, other: Process, outgoing: _Pipe, incoming: _Pipe
    ):
        self._network, self._world = network, network.world
        self._own, self._other, self._out, self._in = own, other, outgoing, incoming
        self._limits_s: dict[int, float] = {}
        self._is_open = True

    def settimeout(self, seconds: float | None) -> None:
        pass

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            whole, millionths = struct.unpack("ll", value)
            self._limits_s[option] = whole + millionths / 1e6

    def send(self, data: memoryview, flags: int = 0) -> int:
        def is_ready() -> bool:
            return not self._is_open or self._out.is_closed or self._out.size() < _BUFFER_BYTES

        limit_s = 0.0 if flags & socket.MSG_DONTWAIT else self._limits_s.get(socket.SO_SNDTIMEO)
        if not self._world.wait(is_ready, limit_s):
            raise BlockingIOError(errno.EAGAIN, "nothing was taken")
        if not self._is_open or self._out.is_closed:
            raise BrokenPipeError(errno.EPIPE, "the other side has gone")
        below = self._world.choices.below
        most = min(len(data), _BUFFER_BYTES - self._out.size())
        count = most - below(most) if below(4) == 3 else most
        last_s = self._out.arriving[-1][0] if self._out.arriving else 0.0
        delay_s = _DELAYS_S[below(len(_DELAYS_S))] if below(8) == 7 else 0.0
        arrives_s = max(last_s, self._world.now_s + delay_s)
        self._out.arriving.append((arrives_s, bytes(data[:count])))
        self._world.look_at(arrives_s)
        return count

    def recv_into(self, view: Any, most: int = 0, flags: int = 0) -> int:
        del most

        def is_ready() -> bool:
            if not self._is_open:
                return True
            if self._network.are_apart(self._own, self._other):
                return False
            now_s = self._world.now_s
            return self._in.has_arrived(now_s) or (self._in.is_closed and not self._in.arriving)

        limit_s = 0.0 if flags & socket.MSG_DONTWAIT else self._limits_s.get(socket.SO_RCVTIMEO)
        if not self._world.wait(is_ready, limit_s):
            raise BlockingIOError(errno.EAGAIN, "nothing has come")
        if not self._is_open:
            raise OSError(errno.EBADF, "closed")
        if not self._in.arriving:
            return 0
        arrives_s, data = self._in.arriving.pop(0)
        count = min(len(data), len(view))
        view[:count] = data[:count]
        if flags & socket.MSG_PEEK:
            self._in.arriving.insert(0, (arrives_s, data))
        elif count < len(data):
            self._in.arriving.insert(0, (arrives_s, data[count:]))
        return count

    def shutdown(self, how: int) -> None:
        del how
        self._out.is_closed = self._in.is_closed = True

    def close(self) -> None:
        self._is_open = False
        self._out.is_closed = self._in.is_closed = True
