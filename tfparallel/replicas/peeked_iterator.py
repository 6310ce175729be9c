"""An iterator whose next elements can be looked at before they are taken."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple


class BatchOfNumber(NamedTuple):
    """Stands for a batch that others read, in a dataset that begins with `first`."""

    first: Any
    number: int


class PeekedIterator:
    """The elements of an iterator, in its order."""

    def __init__(self, iterator: Iterator):
        self._iterator = iterator
        self._seen: collections.deque = collections.deque()

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        return self._seen.popleft() if self._seen else next(self._iterator)

    def peek(self, most: int) -> list:
        """The next elements, fewer where it ends; they still come."""
        missing = max(0, most - len(self._seen))
        self._seen.extend(itertools.islice(self._iterator, missing))
        return list(itertools.islice(self._seen, most))
