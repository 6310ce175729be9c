"""Where a process listens for the others of its job, and whom it lets in."""

import contextlib
import errno
import ipaddress
import math
import selectors
import socket
import time

from tfparallel.coordination.proof import Challenge

_MOST_GUESTS = 128  # that have connected and not proved yet that they know the token
_GREETING_S = 5.0  # for them to prove it
_GREETING_S_IF_FULL = 0.5  # while others wait for a place


def listen(host: str, port: int = 0, backlog: int | None = None) -> socket.socket:
    """A listening socket at the address by which other processes reach this one.

    Args:
        host: a name or an address. Where it is another machine's (of a proxy), or a name that only
            this machine takes for loopback, as Debian does with its own, it listens everywhere.
        port: 0 for a free one.
        backlog: how many may wait to be accepted; None leaves it to Python.

    Raises:
        OSError: if the port is taken.
    """
    for family, address in _own_addresses(host):
        try:
            return socket.create_server((address, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            # not an address of this machine, or not of a family that it has
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", port), backlog=backlog)


def _own_addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses: list[tuple[socket.AddressFamily, str]]
    addresses = [(family, str(where[0])) for family, _, _, _, where in found]
    if host == "localhost" or _is_address(host):
        return addresses
    return [] if any(ipaddress.ip_address(a).is_loopback for _, a in addresses) else addresses


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Guest:
    """Somebody who has connected.

    Args:
        connection: from it; closed with it.
        challenge: what it is asked.

    Attributes:
        connection: as above.
        message: what it has said, once it is known.
        came_s: when, by the monotonic clock.
    """

    def __init__(self, connection: socket.socket, challenge: Challenge):
        self.connection, self._challenge = connection, challenge
        self.message, self._reply = b"", bytearray()
        self.came_s = time.monotonic()
        connection.setblocking(False)
        connection.send(challenge.sent)  # a new connection has room for it

    def hear(self) -> bool:
        """Takes what has come; whether the guest is known now.

        Raises:
            OSError: if it has gone, or proves to be a stranger.
        """
        more = self.connection.recv(self._challenge.missing(self._reply))
        if not more:
            raise ConnectionResetError("it has gone")
        self._reply += more
        if self._challenge.missing(self._reply):
            return False
        self.message = self._challenge.message(bytes(self._reply))
        return True

    def answer(self, text: bytes = b"") -> None:
        """Tells it, by which it knows whom it has reached; OSError if it has gone, or is stuck."""
        self.connection.settimeout(_GREETING_S)
        self.connection.sendall(self._challenge.answer(text))

    def close(self) -> None:
        """Closes its connection."""
        self.connection.close()


class Door:
    """Lets in who proves that he knows the token. Strangers, silent ones too, hold nobody up.

    Of those who have not proved it yet, a fixed number stand at the door, the others in the
    system's queue. Who has not in `_GREETING_S` is turned away; while there is no room, sooner.

    Args:
        listener: at which they connect; not closed with it.
        key: see `proof.key_of`.
        most_bytes: how long the message of a guest may be.
    """

    def __init__(self, listener: socket.socket, key: bytes, most_bytes: int = 0):
        self._listener, self._key, self._most_bytes = listener, key, most_bytes
        self._guests: dict[socket.socket, Guest] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Turns away all that stand there."""
        for guest in self._guests.values():
            guest.close()
        self._guests.clear()
        self._selector.close()

    def next(self, within_s: float) -> Guest | None:
        """The next guest that is known, who waits for an `answer`; None if none comes in time.

        Raises:
            OSError: if the listener was shut.
        """
        deadline_s = time.monotonic() + within_s
        while True:
            self._accept_while_there_is_room()
            left_s = deadline_s - time.monotonic()
            for key, _ in self._selector.select(max(0.0, min(left_s, self._oldest_leaves_in()))):
                if key.fileobj is self._listener:
                    self._accept()
                elif self._is_known(guest := self._guests[key.fileobj]):  # type: ignore[index]
                    return guest
            self._turn_away_the_slow()
            if left_s <= 0:
                return None

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has gone
            connection, _ = self._listener.accept()
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                guest = Guest(connection, Challenge(self._key, self._most_bytes))
            except OSError:
                connection.close()
                return
            self._guests[connection] = guest
            self._selector.register(connection, selectors.EVENT_READ)

    def _is_known(self, guest: Guest) -> bool:
        try:
            is_known = guest.hear()
        except BlockingIOError:
            return False
        except OSError:
            self._forget(guest)
            guest.close()
            return False
        if is_known:
            self._forget(guest)
        return is_known

    def _forget(self, guest: Guest) -> None:
        self._selector.unregister(guest.connection)
        del self._guests[guest.connection]

    def _oldest_leaves_in(self) -> float:
        if not self._guests:
            return math.inf
        allowed_s = _GREETING_S if len(self._guests) < _MOST_GUESTS else _GREETING_S_IF_FULL
        oldest = next(iter(self._guests.values()))
        return oldest.came_s + allowed_s - time.monotonic()

    def _turn_away_the_slow(self) -> None:
        while self._oldest_leaves_in() <= 0:
            guest = next(iter(self._guests.values()))
            self._forget(guest)
            guest.close()

    def _accept_while_there_is_room(self) -> None:
        if self._listener.fileno() < 0:
            raise OSError(errno.EBADF, "the listener is closed")
        has_room = len(self._guests) < _MOST_GUESTS
        is_asked = self._listener in self._selector.get_map()
        if has_room and not is_asked:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif is_asked and not has_room:
            self._selector.unregister(self._listener)
