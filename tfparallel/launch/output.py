"""The output of many workers as whole, labelled lines on one terminal.

    worker's pipe --Relay--> lines --Outbox (one thread writes)--> standard output or error

One writer for everything is what keeps lines whole, also when both streams end in one file. It is
a thread of its own so that a reader that stalls (`| less`, Ctrl-S) delays workers, but never the
launcher, which must stay able to stop them.
"""

import collections
import contextlib
import io
import os
import queue
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

# How much of a worker's standard error is kept for the report on its failure.
TAIL_LINES = 500
_TAIL_LINE_BYTES = 2_000

_CHUNK_BYTES = 65_536
# Output without a line end is passed on in pieces of this size, so that memory stays bounded.
_MAX_LINE_BYTES = 1 << 20
_OUTBOX_CHUNKS = 64

_LABEL_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")


class ByteStream(Protocol):
    """What the launcher needs of a stream it writes to: an unbuffered binary file, or BytesIO."""

    def write(self, data: bytes | memoryview, /) -> int | None:
        """Write some of `data`; return how much, None for nothing yet."""

    def fileno(self) -> int:
        """The file descriptor; asked for only after `write` returned None."""

    def isatty(self) -> bool:
        """Whether this is a terminal."""


class Outbox:
    """A queue of finished text and the one thread that writes it.

    Args:
        stdout, stderr: where to; by default standard output and error, past Python's buffers.
    """

    def __init__(self, stdout: ByteStream | None = None, stderr: ByteStream | None = None):
        self.stdout = stdout or io.FileIO(1, "w", closefd=False)
        self.stderr = stderr or io.FileIO(2, "w", closefd=False)
        self._queue: queue.Queue[tuple[ByteStream, bytes] | None] = queue.Queue(_OUTBOX_CHUNKS)
        self._thread = threading.Thread(target=self._write_all, name="outbox", daemon=True)

    def __enter__(self) -> "Outbox":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not KeyboardInterrupt:  # which says that the reader has been waited for enough
            self._queue.put(None)
            self._thread.join()

    def put(self, stream: ByteStream, text: bytes) -> None:
        """Hand over whole lines; waits while the queue is full."""
        self._queue.put((stream, text))

    def put_if_room(self, stream: ByteStream, text: bytes) -> None:
        """Hand over whole lines; drops them when the queue is full. Never waits."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((stream, text))

    def is_empty(self) -> bool:
        """Whether all that was handed over is written, or being written."""
        return self._queue.empty()

    def _write_all(self) -> None:
        closed: list[ByteStream] = []
        while (item := self._queue.get()) is not None:
            stream, text = item
            if stream in closed:
                continue
            try:
                _write(stream, text)
            except OSError:
                # `| head` has ended, or the disk is full. Training outlives its log.
                closed.append(stream)


class Relay(threading.Thread):
    """Reads one pipe of a worker until all its writers have closed it.

    Args:
        pipe: what to read.
        outbox, stream: where lines go, each after `prefix`; None shows them nowhere.
        prefix: see `label_prefix`.
        on_end: called at the end.
        log: a file that gets them as they are, at its end.

    Attributes:
        tail: the last lines, without labels. Complete when the thread has ended.
    """

    def __init__(
        self,
        pipe: IO[bytes],
        outbox: Outbox,
        stream: ByteStream | None,
        prefix: bytes,
        on_end: Callable[[], None],
        log: Path | None = None,
    ):
        super().__init__(name=f"relay {prefix!r}", daemon=True)
        self.tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self._pipe, self._outbox, self._stream = pipe, outbox, stream
        self._prefix, self._on_end = prefix, on_end
        self._log = None if log is None else log.open("ab", buffering=0)

    def run(self) -> None:
        """Relay until end of file, then say so."""
        partial = b""
        while chunk := os.read(self._pipe.fileno(), _CHUNK_BYTES):
            *lines, partial = (partial + chunk).split(b"\n")
            if len(partial) > _MAX_LINE_BYTES:
                lines.append(partial)
                partial = b""
            self._emit(lines)
        self._emit([partial] if partial else [])
        self._pipe.close()
        if self._log is not None:
            self._log.close()
        self._on_end()

    def _emit(self, lines: Sequence[bytes]) -> None:
        if lines:
            self.tail.extend(line[:_TAIL_LINE_BYTES] for line in lines)
            if self._log is not None:
                with contextlib.suppress(OSError):  # the disk is full. Training outlives its log.
                    self._log.write(b"".join(line + b"\n" for line in lines))
            if self._stream is not None:
                self._outbox.put(self._stream, b"".join(self._prefix + x + b"\n" for x in lines))


def label_prefix(label: str, index: int, stream: ByteStream) -> bytes:
    """What each line of a process starts with: "[worker 1] ", in a colour on a terminal only."""
    text = f"[{label}] "
    if not stream.isatty():
        return text.encode()
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True)
    style = _LABEL_COLOURS[index % len(_LABEL_COLOURS)]
    with console.capture() as capture:
        console.print(text, style=style, end="", markup=False, highlight=False, soft_wrap=True)
    return capture.get().encode()


def _write(stream: ByteStream, text: bytes) -> None:
    rest = memoryview(text)
    while rest:
        num_written = stream.write(rest)
        if num_written is None:  # another program has made our terminal non-blocking
            select.select([], [stream], [])
        else:
            rest = rest[num_written:]
