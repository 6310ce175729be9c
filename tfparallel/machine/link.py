"""Links between the hosts of a job, measured by doctors that run on all of them at one time.

Each listens at its own task's address and asks every other: round trips, speed, the other's clock,
and whether the other sees a file that this one has just written into the shared folder.

    doctor of task 0                    doctor of task 1
    listens at 10.0.0.1:2222  <-------  hello, ping x 20, 8 MiB, is file "..." there?
    hello, ping x 20, ...     ------->  listens at 10.0.0.2:2222

All waits end: by the time limit of the probe, also where another host never starts its doctor. Of
the clocks: the answer to a ping holds the other's time, taken for the middle of the round trip
(Cristian's algorithm); half of the shortest round trip is how wrong that can be.
"""

import contextlib
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfparallel.machine.finding import Finding

_HELLO = b"tfparallel doctor 1\n"
_SIZE = struct.Struct("<cQ")
_TIME = struct.Struct("<d")
_PINGS, _CHUNK, _MOST_BYTES = 20, 1 << 16, 8 << 20
_FILE = re.compile(r"tfparallel-doctor-[0-9a-f]{16}")
_SLOW_MBIT_PER_S, _FAR_MS, _CLOCK_MS = 900.0, 2.0, 100.0


@dataclass(frozen=True)
class Link:
    """What was measured of one other host.

    Attributes:
        address: of its task.
        round_trip_s: the shortest.
        mbit_per_s: from there to here.
        clock_s: how far its clock is ahead of this one.
        sees_folder: whether it sees a file of this host; None where no folder was given.
    """

    address: str
    round_trip_s: float
    mbit_per_s: float
    clock_s: float
    sees_folder: bool | None


def check_links(
    address: str, others: Sequence[str], folder: Path | None = None, limit_s: float = 30.0
) -> Iterator[Finding]:
    """What the links to other hosts are, while their doctors run too.

    Args:
        address: "host:port" of this task, whose port is free.
        others: those of the other tasks.
        folder: which is to be the same on all hosts.
        limit_s: how long the others may take to start and to ask.
    """
    deadline = time.monotonic() + limit_s
    with _answering(address, len(others), folder, deadline), _file_in(folder) as name:
        for other in others:
            try:
                yield from findings_of(measure_link(other, name, deadline))
            except OSError as error:
                yield Finding(
                    "link",
                    "problem",
                    f"{other}: no doctor answers within {limit_s:g} s ({error})",
                    "run the same command there at the same time; a firewall may drop its packets",
                )


def findings_of(link: Link) -> Iterator[Finding]:
    """A link in words, and what is bad about it."""
    found = f"{link.address}: {link.mbit_per_s:,.0f} Mbit/s, "
    found += f"round trip {link.round_trip_s * 1e3:.2f} ms"
    if link.mbit_per_s < _SLOW_MBIT_PER_S:
        yield Finding(
            "link", "warning", found, "compress gradients: compression='adaptive' measures whether"
        )
    elif link.round_trip_s * 1e3 > _FAR_MS:
        yield Finding("link", "warning", found, "fewer, larger messages: larger batches")
    else:
        yield Finding("link", "ok", found)
    clock = f"{link.address} is {link.clock_s * 1e3:+.1f} ms from this host's"
    if abs(link.clock_s) * 1e3 > _CLOCK_MS + link.round_trip_s * 500:
        yield Finding("clock", "warning", clock, "run NTP (chrony) on all hosts: logs mislead")
    else:
        yield Finding("clock", "ok", clock)
    if link.sees_folder is False:
        yield Finding(
            "shared folder",
            "problem",
            f"{link.address} does not see the files that this host writes",
            "mount one network file system at that path on all hosts, or name a URL (s3://)",
        )
    elif link.sees_folder:
        yield Finding("shared folder", "ok", f"{link.address} sees the files of this host")


def measure_link(address: str, file_name: str | None, deadline: float) -> Link:
    """Asks the doctor at `address`, as soon as there is one.

    Raises:
        OSError: if none answers until `deadline`, by the monotonic clock.
    """
    with _connected(address, deadline) as stream:
        stream.sendall(_HELLO)
        if _receive(stream, len(_HELLO)) != _HELLO:
            raise ConnectionError("something else than a doctor answers")
        round_trip_s, clock_s = min(_ping(stream) for _ in range(_PINGS))
        mbit_per_s = _speed(stream)
        sees = None if file_name is None else _sees(stream, file_name)
        stream.sendall(_SIZE.pack(b"Q", 0))
        return Link(address, round_trip_s, mbit_per_s, clock_s, sees)


def _ping(stream: socket.socket) -> tuple[float, float]:
    started, began = time.perf_counter(), time.time()
    stream.sendall(_SIZE.pack(b"P", 0))
    (theirs,) = _TIME.unpack(_receive(stream, _TIME.size))
    round_trip_s = time.perf_counter() - started
    return round_trip_s, theirs - (began + round_trip_s / 2)


def _speed(stream: socket.socket) -> float:
    """Mbit/s of what comes; the first eighth, in which TCP finds its speed, is not counted."""
    stream.sendall(_SIZE.pack(b"D", _MOST_BYTES))
    first = _MOST_BYTES // 8
    _receive(stream, first)
    started = time.perf_counter()
    _receive(stream, _MOST_BYTES - first)
    return (_MOST_BYTES - first) * 8e-6 / max(time.perf_counter() - started, 1e-9)


def _sees(stream: socket.socket, name: str) -> bool:
    stream.sendall(_SIZE.pack(b"F", len(name)) + name.encode())
    return _receive(stream, 1) == b"1"


@contextlib.contextmanager
def _answering(
    address: str, num_guests: int, folder: Path | None, deadline: float
) -> Iterator[None]:
    """Answers the other doctors within it; on leaving, waits for those that have not asked yet."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), int(port)), family=family) as listener:
        threads: list[threading.Thread] = []
        accepting = threading.Thread(
            target=_accept, args=(listener, num_guests, folder, deadline, threads), daemon=True
        )
        accepting.start()
        yield
        for thread in (accepting, *threads):
            thread.join(max(0.0, deadline - time.monotonic()))


def _accept(
    listener: socket.socket,
    num_guests: int,
    folder: Path | None,
    deadline: float,
    threads: list[threading.Thread],
) -> None:
    done: list[str] = []
    while len(done) < num_guests and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(min(left, 0.2))
        try:
            guest, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:  # closed: the probe is over
            return
        thread = threading.Thread(target=_serve, args=(guest, folder, deadline, done), daemon=True)
        threads.append(thread)
        thread.start()


def _serve(guest: socket.socket, folder: Path | None, deadline: float, done: list[str]) -> None:
    """Answers one doctor; strangers, and those who hang up, are left."""
    with guest, contextlib.suppress(OSError):
        guest.settimeout(max(0.1, deadline - time.monotonic()))
        if _receive(guest, len(_HELLO)) != _HELLO:
            return
        guest.sendall(_HELLO)
        while True:
            command, size = _SIZE.unpack(_receive(guest, _SIZE.size))
            if command == b"P":
                guest.sendall(_TIME.pack(time.time()))
            elif command == b"D":
                for _ in range(min(size, _MOST_BYTES) // _CHUNK):
                    guest.sendall(bytes(_CHUNK))
            elif command == b"F":
                name = _receive(guest, min(size, 64)).decode(errors="replace")
                guest.sendall(b"1" if _is_there(folder, name) else b"0")
            else:
                break
        done.append("")


def _is_there(folder: Path | None, name: str) -> bool:
    return folder is not None and _FILE.fullmatch(name) is not None and (folder / name).exists()


@contextlib.contextmanager
def _file_in(folder: Path | None) -> Iterator[str | None]:
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tfparallel-doctor-{secrets.token_hex(8)}"
    path.write_text("another host looks whether it sees this file\n")
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def _connected(address: str, deadline: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    while True:
        left = deadline - time.monotonic()
        try:
            stream = socket.create_connection((host.strip("[]"), int(port)), max(0.1, min(left, 2)))
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.settimeout(max(0.1, left))
            return stream
        except OSError:
            if left <= 0:
                raise
            time.sleep(0.1)


def _receive(stream: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = stream.recv(min(size - len(parts), 1 << 18))
        if not part:
            raise ConnectionError("the other doctor hung up")
        parts += part
    return bytes(parts)
