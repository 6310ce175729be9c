"""Pages of memory that are used again: what a new one costs is more than what is written to it.

The system fills a page with zeros when it is first touched: for an array of 4 MB that takes 30
times as long as to write it (3.3 against 0.1 ms on the machine of docs/measurements/sharded.md).
The C library keeps pages, but in a heap of each thread that has ever freed such an array.
"""

import mmap
import threading
import weakref

import numpy as np

_KEPT_BYTES = 32 << 20


class PagePool:
    """Arrays of bytes in whole pages, which come back when nobody holds an array any more.

    Pages that nobody has are kept up to twice the largest array there was, or `_KEPT_BYTES` if that
    is more; beyond that the system has back those that were unused for longest.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._largest_bytes = 0
        self._lock = threading.RLock()  # an array may be freed in here, by the garbage collector

    @property
    def free_bytes(self) -> int:
        """What is kept, and nobody has."""
        with self._lock:
            return sum(map(len, self._free))

    def empty(self, size_bytes: int) -> np.ndarray:
        """As `np.empty(size_bytes, np.uint8)`, for 1 byte or more, at the beginning of a page."""
        pages = self._taken(size_bytes)
        memory = np.frombuffer(pages, np.uint8)
        weakref.finalize(memory, self._give_back, pages).atexit = False
        return memory

    def _taken(self, size_bytes: int) -> mmap.mmap:
        with self._lock:
            self._largest_bytes = max(self._largest_bytes, size_bytes)
            for i in reversed(range(len(self._free))):
                if len(self._free[i]) == size_bytes:
                    return self._free.pop(i)
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _give_back(self, pages: mmap.mmap) -> None:
        with self._lock:
            self._free.append(pages)
            while self.free_bytes > max(_KEPT_BYTES, 2 * self._largest_bytes):
                del self._free[0]
