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
_ROUND_TRIP = struct.Struct("@I")  # microseconds, `tcpi_rtt` of `struct tcp_info`
_ROUND_TRIP_AT = 68


def pace_if_far(connection: socket.socket) -> None:
    """Spreads what `connection` sends, if its other end is far; it may have to be asked first.

    The speed is TCP's own, which follows the link. Only Linux can do it.

    Args:
        connection: over TCP, on which messages went there and back.
    """
    if sys.platform == "linux" and round_trip_s(connection) >= FAR_S:
        # A kernel that is none of Linux's, in a sandbox, may not know it: then nothing is lost.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _NO_LIMIT)


def round_trip_s(connection: socket.socket) -> float:
    """What the kernel has seen an answer take, smoothed; 0 as long as it has seen none."""
    size = _ROUND_TRIP_AT + _ROUND_TRIP.size
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    return 1e-6 * _ROUND_TRIP.unpack_from(info.ljust(size, b"\0"), _ROUND_TRIP_AT)[0]
