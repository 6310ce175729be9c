"""The command line: `tfparallel launch --standalone --workers 2 train.py`.

Imports no TensorFlow, so that mistakes on the command line show at once.
"""

import argparse
from collections.abc import Callable, Sequence

from tfparallel.launch.backups import add_backups_command
from tfparallel.launch.completion import add_completion_command, complete
from tfparallel.launch.doctor import add_doctor_command
from tfparallel.launch.launch_command import add_launch_command
from tfparallel.launch.manifest_command import add_manifest_command
from tfparallel.launch.report_command import add_report_command
from tfparallel.launch.selftest_command import add_selftest_command
from tfparallel.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments without the program's name; those of this process by default.

    Returns:
        The exit status of the command, which its own function describes. Mistakes in `argv` exit
        with 2.
    """
    parser = _make_parser()
    complete(parser)
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfparallel", description="Distribution strategies for Keras 3 on TensorFlow."
    )
    parser.add_argument("--version", action="version", version=f"tfparallel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_parser = commands.add_parser
    add_launch_command(add_parser)
    add_manifest_command(add_parser)
    add_backups_command(add_parser)
    add_doctor_command(add_parser)
    add_selftest_command(add_parser)
    add_completion_command(add_parser)
    add_report_command(add_parser)
    return parser
