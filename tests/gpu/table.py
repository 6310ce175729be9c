"""Writes `copies.json` anew: `python -m tests.gpu.table`, with "default" or a part of rows' names
for some of them; more copies than before in any direction are refused.

A step that may not be in the table (an int32 through a `RemoteCall`, no kernel, Python) is said
and left out, so that its test fails. Rows of steps that are no more go.
"""

import json
import sys
from pathlib import Path

from tests.gpu.audit import DIRECTIONS

_TABLE = Path(__file__).with_name("copies.json")


def read_table() -> dict[str, dict]:
    """Of each step its `Audit.row`."""
    return json.loads(_TABLE.read_text()) if _TABLE.exists() else {}


def row_name(strategy: str, model: str, size: str) -> str:
    """The name of a step's row."""
    return f"{strategy}, {model}, {size}"


def risen_directions(row: dict, before: dict) -> list[str]:
    """The directions with more copies than before: fewer in another do not make up for them.

    Collectives are between devices, too.
    """
    return [each for each in DIRECTIONS if _crossing(row, each) > _crossing(before, each)]


def _crossing(row: dict, direction: str) -> int:
    collectives = row.get("collectives", {}) if direction == "between_devices" else {}
    return row[direction] + sum(collectives.values())


def main(only: str = "") -> int:
    """Counts the steps whose rows' names have `only` in them, or those of `make test`."""
    from tests.helpers import open_logical_cpus

    open_logical_cpus(4)
    from tests.gpu.steps import BY_DEFAULT, EVERY, audited

    names = {row_name(*key): key for key in EVERY}
    table = {name: row for name, row in read_table().items() if name in names}
    refused = []
    for name, key in names.items():
        if not (key in BY_DEFAULT if only == "default" else only in name):
            continue
        found, before = audited(*key), table.get(name)
        if wrong := found.faults():
            refused.append(f"{name}: {wrong}")
        elif before and risen_directions(found.row(), before):
            refused.append(f"{name}: {found.row()}, before {before}")
        else:
            table[name] = found.row()
            _write(table)  # it takes long, and may be ended before its end
    print("\n".join(refused))
    return bool(refused)


def _write(table: dict[str, dict]) -> None:
    rows = [f"{json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    _TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
