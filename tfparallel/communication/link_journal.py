"""What a connection does from moment to moment, while somebody wants to know."""

import time
from collections.abc import Callable

COLLECTIVE = "ring_collective"  # the name of operations in graphs that go through our transport


class LinkJournal:
    """Spans of sending and receiving, of all threads of one process.

    Args:
        now_s: the clock of the one who notes.

    Attributes:
        spans: kind, start and end by `now_s`.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic):
        self._now_s = now_s
        self.spans: list[tuple[str, float, float]] = []
        self._ahead_s = time.time() - now_s()

    def note(self, kind: str, began_s: float) -> None:
        """Something has ended now."""
        self.spans.append((kind, began_s, self._now_s()))

    def since_1970(self) -> list[tuple[str, float, float]]:
        """The spans, by the clock that all processes of a host share."""
        return [(kind, a + self._ahead_s, b + self._ahead_s) for kind, a, b in self.spans]
