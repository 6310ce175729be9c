"""Whether delays of known length land in their category, of a job killed again and again.

    python benchmarks/restarts.py                # 21 runs, 20 restarts; 15 minutes, quiet
    python benchmarks/restarts.py --runs 3

`restarted_training.py` is delayed in twelve places, notes each delay, and is killed at a random
moment. What a run did after its last line in the ledger is lost with it, and counts as down. Beside
the delays the ledger has what Keras and data take: a second job, whose runs are not delayed and are
killed in the same steps, tells how much, and is taken off.
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
    """Runs the jobs, and prints what was known beside what the ledgers say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=21)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        delayed, plain = Path(base) / "delayed", Path(base) / "plain"
        for folder in (delayed, plain):
            folder.mkdir()
        for run in range(args.runs):
            _run(delayed, run)
            time.sleep(DOWN_S)
        for run in range(args.runs):
            _run(plain, run, last_step=_steps(delayed, run))
        Console().print(_table(delayed, plain))


def _run(folder: Path, run: int, last_step: int | None = None) -> None:
    options = [] if last_step is None else [str(last_step)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "restarted_training.py"), str(folder), str(run), *options],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent), "KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != -signal.SIGKILL:
        raise RuntimeError(f"expected a run that is killed. Received:\n{done.stderr[-2000:]}")


def _delays(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "delays.jsonl").read_text().splitlines()]


def _steps(folder: Path, run: int) -> int:
    """Steps that a delayed run has begun."""
    spans = _delays(folder)
    return 1 + sum(span["run"] == run and span["category"] == "productive" for span in spans)


def known(folder: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each category, of what a run did before its last line."""
    last_at = {line["run"]: line["at"] for line in lines}
    starts = {line["run"]: line["at"] for line in lines if line["kind"] == "start"}
    seconds: dict[str, float] = collections.Counter()
    for span in _delays(folder):
        if span["to"] <= last_at[span["run"]]:
            seconds[span["category"]] += span["to"] - span["from"]
    seconds["down"] = sum(starts[run + 1] - last_at[run] for run in range(max(starts)))
    return dict(seconds)


def told(found: Goodput) -> dict[str, float]:
    """Seconds of each category, by the ledger."""
    return {**found.lost_s, "productive": found.productive_s + found.lost_s["repeated steps"]}


def _table(delayed: Path, plain: Path) -> Table:
    lines, plain_lines = (read_ledger(folder / "measure") for folder in (delayed, plain))
    injected, beside = known(delayed, lines), known(plain, plain_lines)
    found = goodput(lines)
    ledger, plain_ledger = told(found), told(goodput(plain_lines))
    again_s = found.lost_s["repeated steps"]
    table = Table(title=f"{found.runs} runs, {found.steps} steps, repeated {again_s:.1f} s")
    titles = ("category", "known (s)", "ledger (s)", "not delayed: known", "ledger", "off", "")
    for title in titles:
        table.add_column(title)
    for name, seconds in injected.items():
        delays_s = seconds - beside.get(name, 0.0)
        off = (ledger[name] - plain_ledger[name]) / delays_s - 1
        figures = (seconds, ledger[name], beside.get(name, 0.0), plain_ledger[name])
        mark = "" if abs(off) <= WITHIN else "more than 5 %"
        table.add_row(name, *(f"{figure:.2f}" for figure in figures), f"{off:+.1%}", mark)
    return table


if __name__ == "__main__":
    main()
