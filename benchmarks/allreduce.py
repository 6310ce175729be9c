"""Times one all-reduce of float32 values between two processes of this machine, by size.

    python benchmarks/allreduce.py
    python benchmarks/allreduce.py --torch-python /path/to/venv/bin/python --json out.json

Ours goes through a strategy, as a replica's `all_reduce` in a `tf.function`; the others are called
directly. Contestants stay up and take turns within every round. Bus bandwidth is what each link of
a ring carries: `2 (N - 1) / N * bytes / seconds` (https://github.com/NVIDIA/nccl-tests,
doc/PERFORMANCE.md), here bytes over seconds.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from contestants import Contestant, running  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
PROGRAM, TORCH_PROGRAM = "allreduce_contestant.py", "torch_allreduce_contestant.py"
OURS = "tfparallel Horovod"


def all_contestants(torch_python: str | None) -> list[Contestant]:
    """Ours, and the transports themselves."""

    def tensorflow(name: str, strategy: str, call: str) -> Contestant:
        return Contestant(name, "", 2, PROGRAM, {"strategy": strategy, "call": call})

    chosen = [
        tensorflow(OURS, "horovod", "strategy"),
        tensorflow("raw Horovod", "horovod", "raw"),
        tensorflow("tfparallel MultiWorker", "multi_worker", "strategy"),
        tensorflow("tf.distribute MultiWorker", "multi_worker", "stock"),
    ]
    if torch_python:
        chosen.append(Contestant("torch Gloo", "", 2, TORCH_PROGRAM, python=torch_python))
    return chosen


def measure(chosen: list[Contestant], rounds: int) -> dict[str, dict[int, list[float]]]:
    """Median seconds of every turn: `{name: {bytes: [by round]}}`."""
    times: dict = {each.name: {size: [] for size in SIZES} for each in chosen}
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(running(each, "", "")) for each in chosen]
        for turn in range(rounds):
            for size in SIZES:
                first = turn % len(started)
                for each in started[first:] + started[:first]:
                    steps = max(5, min(50, (64 << 20) // size))
                    ranks = each.ask("timed", size=size, steps=steps)
                    by_step = zip(*ranks, strict=True)
                    median = statistics.median(max(step) for step in by_step)
                    times[each.contestant.name][size].append(median)
    return times


def print_times(times: dict[str, dict[int, list[float]]]) -> None:
    """Prints bus bandwidths, and times over those of our own."""
    table = Table(title=f"MB/s on the bus (time / {OURS}'s); load {os.getloadavg()[0]:.1f}")
    table.add_column("")
    for size in SIZES:
        table.add_column(
            f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB", justify="right"
        )
    for name, by_size in times.items():
        cells = []
        for size, seconds in by_size.items():
            pairs = zip(seconds, times[OURS][size], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            cells.append(f"{size / statistics.median(seconds) / 1e6:.3g} ({ratio:.2f})")
        table.add_row(name, *cells)
    Console(width=None if Console().is_terminal else 120).print(table)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch-python", help="interpreter that can import torch")
    parser.add_argument("--json", help="also write all times to this file")
    options = parser.parse_args()
    times = measure(all_contestants(options.torch_python), options.rounds)
    print_times(times)
    if options.json:
        Path(options.json).write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
