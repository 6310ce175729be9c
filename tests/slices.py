"""Which tests `make test` runs this time, of those that take turns: others at each commit.

A test that takes turns has a number, by its name, and a run has one, that of its slice. `make test`
says `TEST_SLICE=commit`, by which each commit gets the next slice. Of tests marked `turns`, and of
the conformance pairs, it runs an eighteenth, so that all have run at eighteen commits in a row. Of
the pairs that are left out otherwise it runs those whose number is the slice's: some 30. A strategy
that is asked little has its turn as a whole, as its processes cost more than its pairs.
The slice is in pytest's first lines; `TEST_SLICE=17` asks for that one again. Without the variable
every test has its turn; `make test-all` runs all there are.
"""

import os
import subprocess
import zlib
from pathlib import Path
from typing import Any

NUM_SLICES = 720
TURNS = 18  # divides it
VARIABLE = "TEST_SLICE"


def slice_of(name: str, group: str | None = None) -> int:
    """The slice that a test belongs to, whatever other tests there are; a group has one turn."""
    own = zlib.crc32(name.encode()) % NUM_SLICES
    return own if group is None else own - own % TURNS + slice_of(group) % TURNS


def has_its_turn(number: int, slice_of_run: int | None) -> bool:
    """Whether a test of that slice is to run, taking turns: always where there are no slices."""
    return slice_of_run is None or (number - slice_of_run) % TURNS == 0


def is_asked(item: Any, slice_of_run: int | None) -> bool:
    """Whether `make test` runs a test of pytest in a slice: none that is `long`, some in turns."""
    takes_turns = item.get_closest_marker("turns")
    has_turn = not takes_turns or has_its_turn(slice_of(item.nodeid), slice_of_run)
    return has_turn and not item.get_closest_marker("long")


def slice_of_this_run() -> int | None:
    """The slice to run: `TEST_SLICE`, or by the number of commits where it is "commit".

    Raises:
        ValueError: if the variable is neither that nor the number of a slice.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return None
    if given == "commit":
        return _num_commits() % NUM_SLICES
    if not given.isdecimal() or int(given) >= NUM_SLICES:
        raise ValueError(
            f"{VARIABLE} must be 0 to {NUM_SLICES - 1}, or 'commit'. Received: {given!r}."
        )
    return int(given)


def _num_commits() -> int:
    """How many commits led here; 0 for a copy of the files without git."""
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return int(counted.stdout) if counted.returncode == 0 else 0
