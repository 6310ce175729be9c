"""Counts that a user gives: whole numbers of at least one."""


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
