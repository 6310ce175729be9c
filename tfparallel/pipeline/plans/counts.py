"""Options that a user gives: counts, and names of a few."""

from collections.abc import Sequence


def check_counts(**counts: int) -> None:
    """Refuse a count that is not a whole number of at least one.

    Raises:
        ValueError: naming the count.
    """
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"{name} must be a whole number of at least 1. Received: {name}={count!r}."
            )


def check_choice(name: str, choice: str, choices: Sequence[str]) -> None:
    """Refuse a word that is none of `choices`.

    Raises:
        ValueError: naming the option.
    """
    if choice not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {listed}. Received: {name}={choice!r}.")
