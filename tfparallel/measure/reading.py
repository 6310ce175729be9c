"""Records as they stand in a folder. Needs no TensorFlow."""

import json
from pathlib import Path
from typing import Any

FILE = "measure.jsonl"


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The lines of the first rank; the last one is left out if it is not whole.

    Raises:
        FileNotFoundError: without a file.
    """
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]
