"""The command `tfparallel doctor`: what is wrong with this machine, before a job runs on it.

Imports no TensorFlow here: a doctor also works where that is what is broken.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from tfparallel.machine.examination import examine
from tfparallel.machine.finding import Finding, worst

HEALTHY, ILL = 0, 1  # exit statuses
_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
_LONGEST_LINK_S = 3600.0


def add_doctor_command(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `doctor` to the subcommands of the command line."""
    doctor = add_parser(
        "doctor",
        help="say what is wrong with this machine, before a job runs on it",
        description="Look at versions, devices, cores, threads, network, TF_CONFIG and folders.",
        epilog="Exit status: 0, or 1 if there is a problem (warnings are none).",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="findings as JSON, for scripts")
    doctor.add_argument("--folder", type=Path, metavar="DIR", help="where the job writes")
    doctor.add_argument(
        "--link",
        type=_seconds,
        metavar="S",
        nargs="?",
        const=30.0,
        default=0.0,
        help="measure the links to the other hosts of TF_CONFIG, on which the same command runs at "
        "the same time; S seconds at most (default: 30)",
    )
    doctor.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    findings = []
    for finding in examine(folder=args.folder, link_s=args.link):
        findings.append(finding)
        if not args.json:
            _show(finding)
    if args.json:
        print(as_json(findings))
    return ILL if worst(findings) == "problem" else HEALTHY


def as_json(findings: Iterable[Finding]) -> str:
    """`{"status": ..., "findings": [{"check", "status", "found", "cure"}, ...]}`."""
    findings = list(findings)
    each = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"status": worst(findings), "findings": each}, indent=2)


def _show(finding: Finding) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{_MARKS[finding.status]:<8} {escape(finding.check)}: {escape(finding.found)}")
    if finding.status != "ok" and finding.cure:
        console.print(f"         -> {escape(finding.cure)}")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST_LINK_S:
        raise argparse.ArgumentTypeError(
            f"expected seconds, up to {_LONGEST_LINK_S:g}. Received: {text[:40]!r}."
        )
    return value
