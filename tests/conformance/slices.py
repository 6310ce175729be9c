"""Which of the pairs that `make test` leaves out it runs this time: another slice at each commit.

A pair is a strategy's row and a case. `make test` says `CONFORMANCE_SLICE=commit`, by which each
commit gets the next slice: all pairs have run once as many commits as there are slices have been
tested in a row. The number is in pytest's first lines; `CONFORMANCE_SLICE=17` asks for that one
again. A slice is some 25 pairs, half a minute, and a third of the `core` cases of rows that take
turns. `make test-all` runs all of them at once.
"""

import os
import subprocess
import zlib
from pathlib import Path

NUM_SLICES = 480
VARIABLE = "CONFORMANCE_SLICE"


def slice_of_pair(row_name: str, case_name: str) -> int:
    """The slice that a pair belongs to, whatever other pairs there are."""
    return zlib.crc32(f"{row_name}-{case_name}".encode()) % NUM_SLICES


def slice_of_this_run() -> int | None:
    """The slice to run: `CONFORMANCE_SLICE`, or by the number of commits where it is "commit".

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
