"""What the command line takes as a value: each says what it expects and what it received."""

import argparse

_LONGEST_GRACE_S = 604_800  # a week
_MOST_PROCESSES = 10_000  # of one kind; a machine has 65,535 ports
_MOST_RESTARTS = 1_000_000


def positive_int(text: str) -> int:
    """From 1 to the most processes of a kind."""
    return _int_between(1, _MOST_PROCESSES, text)


def non_negative_int(text: str) -> int:
    """From 0 on."""
    return _int_between(0, _MOST_RESTARTS, text)


def _int_between(least: int, most: int, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"expected an integer from {least} to {most}. Received: {text[:40]!r}."
    )


def names(text: str) -> list[str]:
    """`a,b`: names of hosts."""
    names = [name.strip() for name in text.split(",")]
    if not all(names) or any(name.startswith("-") for name in names):
        raise argparse.ArgumentTypeError(f"expected hosts, as in a,b. Received: {text[:200]!r}.")
    return names


def numbers(text: str) -> list[int]:
    """`0,2`."""
    return [non_negative_int(number) for number in text.split(",")]


def grace_s(text: str) -> float:
    """Seconds, a week at the most."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST_GRACE_S:
        raise argparse.ArgumentTypeError(
            f"expected seconds, from 0 to {_LONGEST_GRACE_S}. Received: {text[:40]!r}."
        )
    return value
