"""Writes `copies.json` anew: `python -m tests.gpu.table`, with "default" or the
beginning of rows' names for some of them; more copies than before in any direction are refused."""

import json
import sys
from pathlib import Path

_TABLE = Path(__file__).with_name("copies.json")


def read_table() -> dict[str, dict[str, int]]:
    """The copies of each step, by direction."""
    return json.loads(_TABLE.read_text()) if _TABLE.exists() else {}


def row_name(strategy: str, model: str, size: str) -> str:
    """The name of a step's row."""
    return f"{strategy}, {model}, {size}"


def risen_directions(totals: dict[str, int], before: dict[str, int]) -> list[str]:
    """The directions with more copies than before: fewer in another do not make up for them."""
    return [direction for direction, count in totals.items() if count > before[direction]]


def main(only: str = "") -> int:
    """Counts the steps whose rows' names begin with `only`, or those of `make test`."""
    from tests.helpers import open_logical_cpus

    open_logical_cpus(4)
    from tests.gpu.steps import BY_DEFAULT, EVERY, audited

    table, risen = read_table(), []
    for key in EVERY:
        name = row_name(*key)
        if not (key in BY_DEFAULT if only == "default" else name.startswith(only)):
            continue
        totals, before = audited(*key).totals(), table.get(name)
        if before and risen_directions(totals, before):
            risen.append(f"{name}: {totals}, before {before}")
            continue
        table[name] = totals
    rows = [f"{json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    _TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print("\n".join(risen))
    return bool(risen)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
