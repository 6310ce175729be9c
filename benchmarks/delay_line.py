"""A link with a delay, in user space, for kernels whose `tc` has no netem.

    python benchmarks/delay_line.py NAMESPACE_A NAMESPACE_B DEVICE MBIT_PER_S ROUND_TRIP_MS

opens a TUN device of that name in each of two network namespaces, prints a line, and passes every
packet on to the other one: after those before it have been sent at the rate, and half of the round
trip. What would wait longer than `QUEUE_S` for the rate is dropped, as a router does. It ends with
its standard input. `network.two_hosts` starts it.
"""

import collections
import ctypes
import errno
import fcntl
import os
import select
import struct
import sys
import time
from pathlib import Path

_LARGEST_PACKET_BYTES = 1 << 16
QUEUE_S = 0.05  # as the token bucket filter of links without a delay
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


class Direction:
    """Packets from one device on their way to another.

    Args:
        bytes_per_s: the rate.
        delay_s: from when a packet has been sent until it arrives.
    """

    def __init__(self, bytes_per_s: float, delay_s: float):
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._free_s = 0.0  # when all packets so far have been sent
        self._on_their_way: collections.deque[tuple[float, bytes]] = collections.deque()
        self.dropped = 0

    def enter(self, packet: bytes, now_s: float) -> None:
        """Takes a packet that came at `now_s`, or drops it."""
        if self._free_s - now_s > QUEUE_S:
            self.dropped += 1
            return
        self._free_s = max(self._free_s, now_s) + len(packet) / self._bytes_per_s
        self._on_their_way.append((self._free_s + self._delay_s, packet))

    def arrived(self, now_s: float) -> list[bytes]:
        """The packets that have come through by now, in their order."""
        packets = []
        while self._on_their_way and self._on_their_way[0][0] <= now_s:
            packets.append(self._on_their_way.popleft()[1])
        return packets

    @property
    def next_s(self) -> float:
        """When the next packet arrives; infinite if there is none."""
        return self._on_their_way[0][0] if self._on_their_way else float("inf")


def open_tun(namespace: str, device: str) -> int:
    """The file of a new TUN device in a namespace; this process stays where it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        Path("/proc/self/ns/net").open() as home,
        Path("/var/run/netns", namespace).open() as other,
    ):
        _enter(libc, other.fileno())
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(tun, _TUNSETIFF, request)
        finally:
            _enter(libc, home.fileno())
    return tun


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")


def pass_on(tuns: list[int], directions: list[Direction], until: int) -> None:
    """Passes packets on between two devices, until the file `until` ends."""
    poll = select.epoll()
    for file in (*tuns, until):
        poll.register(file, select.EPOLLIN)
    while True:
        left_s = min(each.next_s for each in directions) - time.monotonic()
        ready = [file for file, _ in poll.poll(min(max(left_s, 0.0), 1.0))]
        if until in ready and not os.read(until, 1):
            return
        for i, (tun, direction) in enumerate(zip(tuns, directions, strict=True)):
            if tun in ready:
                _read_all(tun, direction)
            for packet in direction.arrived(time.monotonic()):
                _write(tuns[1 - i], packet, direction)


def _write(tun: int, packet: bytes, direction: Direction) -> None:
    try:
        os.write(tun, packet)
    except OSError as error:
        if error.errno != errno.EIO:  # EIO: the device at this end is not up
            raise
        direction.dropped += 1


def _read_all(tun: int, direction: Direction) -> None:
    while True:
        try:
            packet = os.read(tun, _LARGEST_PACKET_BYTES)
        except BlockingIOError:
            return
        direction.enter(packet, time.monotonic())


def main() -> None:
    """Runs the link."""
    *namespaces, device, mbit, round_trip_ms = sys.argv[1:]
    tuns = [open_tun(namespace, device) for namespace in namespaces]
    delay_s = float(round_trip_ms) / 2e3
    directions = [Direction(float(mbit) * 1e6 / 8, delay_s) for _ in tuns]
    print("open", flush=True)
    pass_on(tuns, directions, sys.stdin.fileno())


if __name__ == "__main__":
    main()
