"""Tables of schedules as the papers draw them, compared by their words."""

import textwrap


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in textwrap.dedent(table).strip().splitlines()]
