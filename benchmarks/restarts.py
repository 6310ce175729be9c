"""Whether delays of known length land in their category, of a job killed again and again.

    python benchmarks/restarts.py                # 21 runs, 20 restarts; 6 minutes, quiet
    python benchmarks/restarts.py --runs 3

`restarted_training.py` is delayed in twelve places, notes each delay, and is killed at a random
moment. What a run did after its last line in the ledger is lost with it, and counts as down. What
Keras takes by itself is in the ledger's figures only: on a busy machine that is more than 5 %.
"""

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from tfparallel.measure.goodput import Goodput, goodput, read_ledger  # noqa: E402

DOWN_S = 0.8
WITHIN = 0.05


def main() -> None:
    """Runs the job, and prints what was known beside what the ledger says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=21)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for run in range(args.runs):
            _run(Path(folder), run)
            time.sleep(DOWN_S)
        lines = read_ledger(Path(folder) / "measure")
        Console().print(_table(known(Path(folder), lines), goodput(lines)))


def _run(folder: Path, run: int) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "restarted_training.py"), str(folder), str(run)],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent), "KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != -signal.SIGKILL:
        raise RuntimeError(f"expected a run that is killed. Received:\n{done.stderr[-2000:]}")


def known(folder: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each category, of what a run did before its last line."""
    last_at = {line["run"]: line["at"] for line in lines}
    starts = {line["run"]: line["at"] for line in lines if line["kind"] == "start"}
    seconds: dict[str, float] = collections.Counter()
    for text in (folder / "delays.jsonl").read_text().splitlines():
        span = json.loads(text)
        if span["to"] <= last_at[span["run"]]:
            seconds[span["category"]] += span["to"] - span["from"]
    seconds["down"] = sum(starts[run + 1] - last_at[run] for run in range(max(starts)))
    return dict(seconds)


def _table(expected: Mapping[str, float], found: Goodput) -> Table:
    again_s = found.lost_s["repeated steps"]
    told = {**found.lost_s, "productive": found.productive_s + again_s}
    table = Table(title=f"{found.runs} runs, {found.steps} steps, repeated {again_s:.1f} s")
    for title in ("category", "known (s)", "ledger (s)", "off", ""):
        table.add_column(title)
    for name, seconds in expected.items():
        off = told[name] / seconds - 1
        mark = "" if abs(off) <= WITHIN else "more than 5 %"
        table.add_row(name, f"{seconds:.2f}", f"{told[name]:.2f}", f"{off:+.1%}", mark)
    return table


if __name__ == "__main__":
    main()
