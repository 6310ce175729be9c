"""An error that lists all that is wrong, not the first of it."""

from collections.abc import Sequence

_LONGEST_PROBLEM = 1000


class MistakesError(ValueError):
    """A description by the user with at least one mistake.

    Attributes:
        problems: every mistake, each as "dotted.path: expected this. Received: that."
    """

    def __init__(self, problems: Sequence[str], source: str):
        super().__init__(tuple(problems), source)
        self.problems = tuple(map(_printable, problems))
        self._source = _printable(source)

    def __str__(self) -> str:
        count = len(self.problems)
        heading = f"{self._source} has {count} mistake{'s' if count > 1 else ''}:"
        return "\n  - ".join([heading, *self.problems])


def _printable(text: str) -> str:
    """`text` as any terminal prints it, and no longer than somebody reads."""
    if len(text) > _LONGEST_PROBLEM:
        text = f"{text[:_LONGEST_PROBLEM]}... ({len(text)} characters)"
    return text.encode(errors="backslashreplace").decode()
