"""The command `tfparallel report FOLDER`: what was measured, as one HTML file. No TensorFlow."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

WRITTEN, NOTHING = 0, 1  # exit statuses


def add_report_command(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `report` to the subcommands of the command line."""
    parser = add_parser(
        "report",
        help="make one HTML file of what callbacks.Measure(folder=...) has written",
        description="Make one HTML file of what callbacks.Measure(folder=...) has written.",
        epilog="Exit status: 0, or 1 if there is nothing to report.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="that of Measure")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the report is written (default: FOLDER/report.html)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from tfparallel.measure.html_report import write_report

    path = args.output or args.folder / "report.html"
    try:
        write_report(args.folder, path)
    except (OSError, ValueError, ImportError) as error:
        print(f"tfparallel report: {error}", file=sys.stderr)
        return NOTHING
    print(path)
    return WRITTEN
