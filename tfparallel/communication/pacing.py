"""Packets that go a long way leave one after the other, and not all that may be under way at once.

What is sent at once is more than the buffer of a router on the way holds: what it drops is sent
again, a fifth of a second later or more, and TCP goes on at half the speed. Spread over the time
that an answer takes, all of it comes through: of two ranks at 20 Mbit/s and 100 ms, with a buffer
of 125 KB, a sum of 220 KB takes 140 ms (190 to 900 before), one of 440 KB 229 ms (320 to 480).

Source: Aggarwal, Savage and Anderson, "Understanding the performance of TCP pacing", INFOCOM 2000;
Linux, tcp(7) and socket(7), and `tcp_update_pacing_rate` in net/ipv4/tcp_input.c.
"""

import contextlib
import socket
import struct
import sys

FAR_S = 1e-3  # there and back; within a building it takes less, and pacing spares nothing
_SO_MAX_PACING_RATE = 47  # which Python does not name
_NO_LIMIT = struct.pack("@L", sys.maxsize)  # bytes a second: the kernel's own rate counts
_MICROSECONDS = struct.Struct("@I")
_ROUND_TRIP_AT = 148  # `tcpi_min_rtt` of `struct tcp_info`, since Linux 4.6
_NEVER_SEEN = 0xFFFFFFFF


def pace_if_far(connection: socket.socket) -> None:
    """Spreads what `connection` sends over TCP, if its other end is far.

    The speed is TCP's own, which follows the link. Only Linux can do it.
    """
    if sys.platform != "linux":
        return
    # A kernel that is none of Linux's, in a sandbox, may not know it: then nothing is lost.
    with contextlib.suppress(OSError):
        if round_trip_s(connection) >= FAR_S:
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _NO_LIMIT)


def round_trip_s(connection: socket.socket) -> float:
    """The least that the kernel has seen an answer take; 0 as long as it has seen none."""
    size = _ROUND_TRIP_AT + _MICROSECONDS.size
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    (least,) = _MICROSECONDS.unpack_from(info.ljust(size, b"\0"), _ROUND_TRIP_AT)
    return 0.0 if least == _NEVER_SEEN else 1e-6 * least
