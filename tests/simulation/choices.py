"""Everything that chance decides in a schedule, as one list of numbers: drawn, repeated, shrunk."""

import random
from collections.abc import Callable, Sequence


class Choices:
    """Numbers below given bounds; 0 is what happens on a good day.

    Args:
        seed: draws them.
        given: repeats these instead; when they are used up, every day is a good one.
    """

    def __init__(self, seed: int = 0, given: Sequence[int] | None = None):
        self._random = random.Random(seed) if given is None else None
        self._given = given or ()
        self.made: list[int] = []

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` - 1, all alike."""
        if self._random is None:
            index = len(self.made)
            chosen = min(self._given[index], bound - 1) if index < len(self._given) else 0
        else:
            chosen = int(self._random.random() * bound)
        self.made.append(chosen)
        return chosen

    def rarely(self, chance: float) -> bool:
        """True with this probability."""
        if self._random is None:
            return bool(self.below(2))
        self.made.append(int(self._random.random() < chance))
        return bool(self.made[-1])


def shrunk(
    numbers: Sequence[int], fails: Callable[[Sequence[int]], bool], most_tries: int = 300
) -> list[int]:
    """Fewer numbers, and more zeros among them, that still fail.

    Args:
        numbers: which fail.
        fails: whether some others do.
        most_tries: calls of `fails`.
    """
    best, tries, length = list(numbers), 0, len(numbers)
    while length >= 1 and tries < most_tries:
        start, has_improved = 0, False
        while start < len(best) and tries < most_tries:
            candidates = [best[:start] + best[start + length :]]
            if any(best[start : start + length]):
                zeros = [0] * len(best[start : start + length])
                candidates.append(best[:start] + zeros + best[start + length :])
            for candidate in candidates:
                tries += 1
                if fails(candidate):
                    best, has_improved = candidate, True
                    break
            else:
                start += length
        length = length if has_improved and length > len(best) // 8 else length // 2
    while best and best[-1] == 0:
        best.pop()
    return best
