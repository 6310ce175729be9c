"""The process of one check: `python -m tfparallel.selftest.one_check PLACE FUNCTION ARGUMENTS`.

Writes one line of JSON as its last: the verdict, what was found, and figures. Where the place has a
server of forks, one does the check.
"""

import gc
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tfparallel.selftest.forks import ask_for_fork
from tfparallel.selftest.machine_devices import bench_of_json
from tfparallel.selftest.verdicts import CheckFailedError, CheckSkippedError, Passed

MARK = "tfparallel-selftest "


def write_to(path: Path, bench: str, function: str, *arguments: str) -> None:
    """As `main`, for a process that is a session of its own, and writes to a file.

    What it leaves when it is ended, as code that autograph generates, goes with the file's folder.
    """
    os.setsid()
    tempfile.tempdir = os.environ["TMPDIR"] = str(path.parent)
    with path.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.exit(main(bench, function, *arguments))


def main(bench: str, function: str, *arguments: str) -> int:
    """Runs a check, says how it ended.

    Args:
        bench: as JSON.
        function: "module:name" within `tfparallel.selftest`.
        arguments: of the function, after the bench.
    """
    module, _, name = function.partition(":")
    try:
        check: Callable[..., Passed] = getattr(
            importlib.import_module(f"tfparallel.selftest.{module}"), name
        )
        gc.freeze()  # what is imported stays; each training collects, which else goes through it
        found = check(bench_of_json(bench), *arguments)
    except CheckSkippedError as error:
        return _say("skipped", str(error))
    except CheckFailedError as error:
        return _say("failed", str(error))
    return _say("ok", found.text, found.figures)


def _say(verdict: str, found: str, figures: dict[str, object] | None = None) -> int:
    line = json.dumps({"verdict": verdict, "found": found, "figures": figures or {}})
    print(f"\n{MARK}{line}", flush=True)
    return 0 if verdict != "failed" else 1


if __name__ == "__main__":
    status = ask_for_fork(bench_of_json(sys.argv[1]).folder, sys.argv[1:])
    sys.exit(main(*sys.argv[1:]) if status is None else status)
