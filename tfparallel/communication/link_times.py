"""What a process has spent in collectives so far; two looks tell what was between them."""

from typing import NamedTuple


class LinkTimes(NamedTuple):
    """Sums since a transport was opened.

    Attributes:
        spent_s: within collectives.
        waited_s: of that, until the neighbour had come to the same one.
        bytes_sent: to the neighbour.
        hidden_s: of `spent_s`, while more was computed of what is summed; below 0 where steps have
            waited for longer than collectives took, for threads.
    """

    spent_s: float = 0.0
    waited_s: float = 0.0
    bytes_sent: int = 0
    hidden_s: float = 0.0

    @property
    def stalled_s(self) -> float:
        """For how long steps had nothing to do but wait for collectives."""
        return max(0.0, self.spent_s - self.hidden_s)

    def since(self, before: "LinkTimes") -> "LinkTimes":
        """What has been added since `before`."""
        return LinkTimes(
            self.spent_s - before.spent_s,
            self.waited_s - before.waited_s,
            self.bytes_sent - before.bytes_sent,
            self.hidden_s - before.hidden_s,
        )

    def plus(self, other: "LinkTimes") -> "LinkTimes":
        """Of both together."""
        return LinkTimes(
            self.spent_s + other.spent_s,
            self.waited_s + other.waited_s,
            self.bytes_sent + other.bytes_sent,
            self.hidden_s + other.hidden_s,
        )


NO_LINKS = LinkTimes()
