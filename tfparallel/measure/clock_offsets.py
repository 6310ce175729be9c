"""By how much the clocks of a job's processes differ, of announcements that all can see.

In each round every rank announces what its clock shows and then notes when it has everybody's. What
rank r has announced was seen by rank 0 later, and the other way round. With offset = clock of r -
clock of 0 that says

    announced_r - seen_0  <=  offset  <=  seen_r - announced_0

Each round narrows it. Processes of one host read one clock.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Offset(NamedTuple):
    """Of one rank's clock to that of rank 0.

    Attributes:
        seconds: it is ahead.
        error_s: it may be so much more or less; 0 where they are one clock.
    """

    seconds: float
    error_s: float


def offsets(
    announced: Sequence[Sequence[float]], seen: Sequence[Sequence[float]], hosts: Sequence[str]
) -> list[Offset]:
    """Of each rank.

    Args:
        announced: by round and rank, seconds of that rank's clock.
        seen: by round and rank, when that rank had what all announced in the round.
        hosts: by rank, what tells its clock from those of others.

    Raises:
        ValueError: if clocks were set while they were compared.
    """
    return [_offset(rank, announced, seen, hosts) for rank in range(len(hosts))]


def _offset(
    rank: int,
    announced: Sequence[Sequence[float]],
    seen: Sequence[Sequence[float]],
    hosts: Sequence[str],
) -> Offset:
    if hosts[rank] == hosts[0]:
        return Offset(0.0, 0.0)
    low = max(a[rank] - s[0] for a, s in zip(announced, seen, strict=True))
    high = min(s[rank] - a[0] for a, s in zip(announced, seen, strict=True))
    if low > high:
        raise ValueError(
            "Clocks go on while they are compared. Received: the clock of rank "
            f"{rank} is at least {low:.6f} s and at most {high:.6f} s ahead of that of rank 0: one "
            "of them was set. Profile again."
        )
    return Offset((low + high) / 2, (high - low) / 2)
