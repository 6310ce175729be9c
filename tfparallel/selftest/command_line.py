"""What `tfparallel selftest` does: runs the checks, shows a table, writes JSON."""

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfparallel.machine.gpu_shares import gpus_of_machine
from tfparallel.selftest.catalogue import CHECKS, FIRST, REFERENCE, Check
from tfparallel.selftest.children import run_checks
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.verdicts import Outcome
from tfparallel.version import __version__

WELL, FAILED, STOPPED = 0, 1, 130  # exit statuses
_COLORS = {"ok": "green", "failed": "red", "skipped": "yellow"}


def run_selftest(args: argparse.Namespace) -> int:
    """Runs the checks that are asked for; gives the exit status."""
    try:
        gpus = chosen_gpus(gpus_of_machine(os.environ), args.gpus)
    except ValueError as error:
        args.error(str(error))
    # Checks that run hold GPUs, in sessions of their own: they end with this, also with its job.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes: list[Outcome] = []
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="tfparallel-selftest-") as folder:
        bench = Bench(tuple(gpus), folder)
        os.environ.pop("TF_CONFIG", None)
        os.environ.update(bench.environment())  # of all processes of checks
        try:
            asyncio.run(_run_all(bench, args.only, outcomes, console))
        except KeyboardInterrupt:
            console.print("stopped")
    order = [check.name for check in (*FIRST, *CHECKS)]
    outcomes.sort(key=lambda outcome: order.index(outcome.check))
    show(outcomes, Console(highlight=False))
    if args.json:
        args.json.write_text(outcomes_as_json(outcomes, gpus) + "\n")
    if _has_failed(outcomes):
        return FAILED
    return WELL if len(outcomes) == len(_asked(args.only)) else STOPPED


def chosen_gpus(gpus: Sequence[str], number: int | None) -> list[str]:
    """The first so many GPUs.

    Raises:
        ValueError: if there are fewer.
    """
    if number is None:
        return list(gpus)
    if not 0 <= number <= len(gpus):
        raise ValueError(
            f"--gpus expects 0 to {len(gpus)}, as many as there are. Received: {number}. "
            "`nvidia-smi -L` lists them; CUDA_VISIBLE_DEVICES hides some."
        )
    return list(gpus[:number])


def _asked(word: str) -> list[Check]:
    """The checks with a word in their name, and the reference, which they compare with."""
    return [c for c in (*FIRST, *CHECKS) if word in c.name or c is REFERENCE]


async def _run_all(bench: Bench, word: str, outcomes: list[Outcome], console: Console) -> None:
    asked = _asked(word)
    first = [check for check in asked if check in FIRST]
    others = [check for check in asked if check not in FIRST]
    # GPUs are one check's at a time: of its memory and its clock. Cores are shared.
    at_once = 1 if bench.gpus else max(1, min(4, len(os.sched_getaffinity(0))))
    for checks in (first, others):
        is_forked = not bench.gpus and checks is others and not _has_failed(outcomes)
        async for _, outcome in run_checks(checks, bench, at_once, is_forked):
            outcomes.append(outcome)
            color = _COLORS[outcome.verdict]
            line = f"[{color}]{outcome.verdict}[/] {escape(outcome.check)}"
            console.print(f"{line} ({outcome.seconds:.0f} s), {len(outcomes)} of {len(asked)}")


def _has_failed(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.verdict == "failed" for outcome in outcomes)


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints a table, and below it what to do about what failed, with the end of its output."""
    table = Table(title=f"tfparallel {__version__} selftest")
    for title in ("check", "", "found"):
        table.add_column(title, overflow="fold")
    table.add_column("s", justify="right")
    for each in outcomes:
        verdict = f"[{_COLORS[each.verdict]}]{each.verdict}[/]"
        table.add_row(escape(each.check), verdict, escape(each.found), f"{each.seconds:.0f}")
    console.print(table)
    for each in outcomes:
        if each.verdict == "failed":
            console.rule(f"[red]{escape(each.check)}")
            console.print(f"{escape(each.output)}\n{escape(each.found)}\n-> {escape(each.cure)}")


def outcomes_as_json(outcomes: Sequence[Outcome], gpus: Sequence[str]) -> str:
    """`{"tfparallel", "python", "gpus", "outcomes": [{"check", "verdict", "found", ...}]}`."""
    each = [dataclasses.asdict(outcome) for outcome in outcomes]
    python = sys.version.split()[0]
    head = {"tfparallel": __version__, "python": python, "gpus": list(gpus)}
    return json.dumps({**head, "outcomes": each}, indent=2)
