"""Tables of schedules as the papers draw them, compared by their words."""


def rows(table: str) -> list[list[str]]:
    """Return the words of each device's row, which may go on over several lines."""
    return [row.split() for row in table.split("device")[1:]]
