"""How stale an update may be: which worker may start, and whose update may be applied.

The staleness of an update is the number of other updates that were applied between the moment its
worker read the weights and the moment it is applied itself. Stale-synchronous training bounds it.

    version    0     1     2     3          worker B read version 0 and hands in at version 3:
    worker A   |--1--|--2--|--3--|          staleness 3
    worker B   |-----------------|--4--|

With a bound of 2, A's third update has to wait for B's first. The rule below is that of deadlines:
an update that read version v must be applied at version v + bound at the latest, and one is applied
at a time. So a step may start, or an update may be applied, if afterwards those under way can all
still be applied in the order of their deadlines. The one with the nearest deadline may always be
applied: nobody waits in a circle.

Source: Ho et al., 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server". Differs: they bound the distance of the workers' clocks, we bound each update's staleness.
"""


class StalenessBound:
    """The steps under way, and what their bound allows. Not thread-safe.

    Args:
        bound: the largest staleness, from 0; None sets none.

    Attributes:
        version: how many updates have been applied.
        largest: the largest staleness of an update that was applied.
    """

    def __init__(self, bound: int | None):
        self._bound = bound
        self._read_versions: dict[int, int] = {}  # by the number of the step under way
        self.version = 0
        self.largest = 0

    def may_start(self) -> bool:
        """Whether one more step may read the weights now."""
        return self._is_feasible([*self._read_versions.values(), self.version], self.version)

    def start(self, step: int) -> None:
        """Step number `step` reads the weights now."""
        self._read_versions[step] = self.version

    def may_apply(self, step: int) -> bool:
        """Whether the update of `step` may be applied before those of all others under way."""
        others = [v for other, v in self._read_versions.items() if other != step]
        return self._is_feasible(others, self.version + 1)

    def apply(self, step: int) -> int:
        """The update of `step` has been applied; returns its staleness."""
        staleness = self.version - self._read_versions.pop(step)
        self.version += 1
        self.largest = max(self.largest, staleness)
        return staleness

    def forget(self, step: int) -> None:
        """`step` ended without an update."""
        self._read_versions.pop(step, None)

    def _is_feasible(self, read_versions: list[int], version: int) -> bool:
        if self._bound is None:
            return True
        return all(
            version + position <= read + self._bound
            for position, read in enumerate(sorted(read_versions))
        )
