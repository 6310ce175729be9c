"""Where a rank listens for the others of its job, and whom it lets in."""

import contextlib
import ipaddress
import secrets
import selectors
import socket
import time
from collections.abc import Generator

_MOST_GUESTS = 64  # that have connected and not shown the token yet


def listen(host: str) -> socket.socket:
    """A listening socket at a free port of the address by which other ranks reach this one.

    Args:
        host: a name or an address. Where it is another machine's (of a proxy), or a name that only
            this machine takes for loopback, as Debian does with its own, it listens everywhere.
    """
    for family, address in _own_addresses(host):
        with contextlib.suppress(OSError):  # not an address of this machine
            return socket.create_server((address, 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


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


def accept_known(listener: socket.socket, token: bytes, timeout_s: float) -> socket.socket:
    """The first connection that shows the token; as `all_known`."""
    with contextlib.closing(all_known(listener, token, timeout_s)) as guests:
        return next(guests)


def all_known(
    listener: socket.socket, token: bytes, timeout_s: float
) -> Generator[socket.socket, None, None]:
    """All connections that show the token. Strangers, silent ones too, hold nobody up.

    Raises:
        TimeoutError: if no further one comes in time.
    """
    deadline = time.monotonic() + timeout_s
    shown: dict[socket.socket, bytes] = {}  # by every guest, the oldest first
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def dismiss(guest: socket.socket) -> None:
            selector.unregister(guest)
            del shown[guest]
            guest.close()

        try:
            while (left_s := deadline - time.monotonic()) > 0:
                ready = [key.fileobj for key, _ in selector.select(left_s)]
                if listener in ready:
                    guest, _ = listener.accept()
                    shown[guest] = b""
                    selector.register(guest, selectors.EVENT_READ)
                for guest in [guest for guest in shown if guest in ready]:
                    received = _received(guest, len(token) - len(shown[guest]))
                    shown[guest] += received
                    if secrets.compare_digest(shown[guest], token):
                        selector.unregister(guest)
                        del shown[guest]
                        yield guest
                    elif not received or len(shown[guest]) == len(token):
                        dismiss(guest)
                if len(shown) > _MOST_GUESTS:
                    dismiss(next(iter(shown)))
        finally:
            for guest in shown:
                guest.close()
    raise TimeoutError(f"no rank that knows the token has connected within {timeout_s:g} s")


def _received(guest: socket.socket, most_bytes: int) -> bytes:
    """What a guest that has something to say has said; nothing if it has gone."""
    with contextlib.suppress(OSError):
        return guest.recv(most_bytes)
    return b""
