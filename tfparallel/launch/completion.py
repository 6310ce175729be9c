"""Completion of `tfparallel` in a shell: `eval "$(tfparallel completion bash)"`."""

import argparse
import os
from collections.abc import Callable

_SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers a shell that asks what may come next, and exits; nothing when no shell asks."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def add_completion_command(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `completion` to the subcommands of the command line."""
    completion = add_parser(
        "completion",
        help="print what makes a shell complete this command line",
        description='bash: eval "$(tfparallel completion bash)", there or in ~/.bashrc; zsh: eval '
        '"$(tfparallel completion zsh)" after compinit; fish: tfparallel completion fish | source.',
        allow_abbrev=False,
    )
    completion.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))
    completion.set_defaults(run=_print_shellcode)


def _print_shellcode(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["tfparallel"], shell=args.shell))
    return 0
