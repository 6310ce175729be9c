"""The command `tfparallel selftest`; its checks are loaded when they run."""

import argparse
from collections.abc import Callable
from pathlib import Path


def add_selftest_command(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `selftest` to the subcommands of the command line."""
    selftest = add_parser(
        "selftest",
        help="does every strategy train as one device does, on this machine?",
        description="Run every strategy, NCCL, backups and copies on this machine's devices.",
        epilog="Exit status: 0, or 1 if a check failed (skipped ones are none).",
        allow_abbrev=False,
    )
    selftest.add_argument(
        "--gpus", type=int, metavar="N", help="use N of the GPUs; 0: logical CPUs (default: all)"
    )
    selftest.add_argument("--json", type=Path, metavar="FILE", help="write results there, too")
    selftest.add_argument(
        "--only", metavar="WORD", default="", help="only checks with WORD in their name"
    )
    selftest.set_defaults(run=_run, error=selftest.error)


def _run(args: argparse.Namespace) -> int:
    from tfparallel.selftest.command_line import run_selftest

    return run_selftest(args)
