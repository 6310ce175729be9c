"""An error that lists all that is wrong, not the first of it."""

from collections.abc import Sequence


class MistakesError(ValueError):
    """A description by the user with at least one mistake.

    Attributes:
        problems: every mistake, each as "dotted.path: expected this. Received: that."
    """

    def __init__(self, problems: Sequence[str], source: str):
        super().__init__(tuple(problems), source)
        self.problems = tuple(problems)
        self._source = source

    def __str__(self) -> str:
        count = len(self.problems)
        heading = f"{self._source} has {count} mistake{'s' if count > 1 else ''}:"
        return "\n  - ".join([heading, *self.problems])
