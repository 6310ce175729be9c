"""The command `tfparallel backups`: what a folder of backups holds, and whether it can be trusted.

Imports no TensorFlow, and NumPy only for what stands inside a backup.
"""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tfparallel.callbacks.backup.storage import Manifest, Storage

VALID, INVALID, NONE_FOUND = 0, 1, 2  # exit statuses

_COLUMNS_OF_A_LOG = 200  # of a table that no terminal limits


def add_backups_command(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `backups` to the subcommands of the command line."""
    backups = add_parser(
        "backups",
        help="list, verify and show what BackupAndRestore has saved",
        description="Read the backups that tfparallel.callbacks.BackupAndRestore made.",
        epilog="Exit status: 0, 1 if a backup is invalid, 2 if there is none.",
        allow_abbrev=False,
    )
    actions = backups.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, run, text in (
        ("list", _list, "one line for each backup, by its manifest"),
        ("verify", _verify, "read every byte and compare it with the manifest"),
        ("show", _show, "all that one backup holds"),
    ):
        parser = actions.add_parser(action, help=text, description=text, allow_abbrev=False)
        parser.add_argument("folder", metavar="DIR", help="the backup_dir; a folder or a URL")
        if run is _show:
            parser.add_argument(
                "--number", type=int, metavar="N", help="which backup (default: the newest)"
            )
        parser.set_defaults(run=lambda args, run=run: _run(run, args))


def _run(
    action: Callable[[argparse.Namespace, "Storage", "Console"], int], args: argparse.Namespace
) -> int:
    from rich.console import Console

    from tfparallel.callbacks.backup.storage import Storage

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _COLUMNS_OF_A_LOG
    storage = Storage(args.folder)
    if not storage.numbers():
        print(f"Expected backups in {args.folder}. Received: none.", file=sys.stderr)
        return NONE_FOUND
    return action(args, storage, console)


def _list(args: argparse.Namespace, storage: "Storage", console: "Console") -> int:
    keys = ("epoch", "batch", "time", "strategy", "num_workers")
    table = _table("backup", "manifest", "epoch", "batch", "time", "strategy", "workers", "size")

    def row(manifest: "Manifest") -> list[str]:
        return [*(str(manifest.about.get(key, "?")) for key in keys), _size_of(manifest)]

    return _print_checked(console, table, storage, storage.manifest, row)


def _verify(args: argparse.Namespace, storage: "Storage", console: "Console") -> int:
    table = _table("backup", "all bytes", "files", "size", "SHA-256 of its manifest")

    def row(manifest: "Manifest") -> list[str]:
        return [str(len(manifest.files)), _size_of(manifest), manifest.sha256[:12]]

    return _print_checked(console, table, storage, lambda n: _verified(storage, n), row)


def _print_checked(
    console: "Console",
    table: "Table",
    storage: "Storage",
    check: Callable[[int], "Manifest"],
    row: Callable[["Manifest"], list[str]],
) -> int:
    """Prints a row for each backup, then what is wrong with any; returns the exit status."""
    from tfparallel.callbacks.backup.storage import InvalidBackupError

    problems = []
    for number in storage.numbers():
        try:
            table.add_row(str(number), "valid", *row(check(number)))
        except InvalidBackupError as error:
            table.add_row(str(number), "INVALID")
            problems.append(str(error))
    console.print(table)
    for problem in problems:
        console.print(problem, soft_wrap=True)
    return INVALID if problems else VALID


def _verified(storage: "Storage", number: int) -> "Manifest":
    """The manifest of a backup all of whose files are there, as they were written."""
    from tfparallel.callbacks.backup.part import read_part

    manifest = storage.manifest(number)
    for name in part_names(manifest):
        read_part(storage, number, name)
    return manifest


def part_names(manifest: "Manifest") -> list[str]:
    """The parts that a backup has: the shared one, one of each worker, and its shards."""
    ranks = range(manifest.about["num_workers"])
    has_shards = any(name.startswith("shards-") for name in manifest.files)
    shards = [f"shards-{rank}" for rank in ranks] if has_shards else []
    return ["shared", *(f"worker-{rank}" for rank in ranks), *shards]


def _show(args: argparse.Namespace, storage: "Storage", console: "Console") -> int:
    from tfparallel.callbacks.backup.part import read_part
    from tfparallel.callbacks.backup.saved_shards import shapes_of
    from tfparallel.callbacks.backup.storage import InvalidBackupError

    numbers = storage.numbers()
    number = numbers[-1] if args.number is None else args.number
    if number not in numbers:
        listed = ", ".join(map(str, numbers))
        print(f"--number must be one of {listed}. Received: {number}.", file=sys.stderr)
        return NONE_FOUND
    try:
        manifest = storage.manifest(number)
        parts = {name: read_part(storage, number, name) for name in part_names(manifest)}
    except InvalidBackupError as error:
        print(error, file=sys.stderr)
        return INVALID
    about = _table("backup", str(number))
    for key, value in manifest.about.items():
        about.add_row(key, str(value))
    files = _table("file", "bytes", "SHA-256")
    for name, record in manifest.files.items():
        files.add_row(name, f"{record.size_bytes:,}", record.sha256)
    model = parts["shared"]["model"]
    variables = _table("variable", "dtype", "shape")
    for path, (shape, dtype) in zip(model["paths"], shapes_of(model), strict=True):
        variables.add_row(path, dtype, str(list(shape)))
    callbacks = _table("callback", "state")
    for name, state in parts["shared"]["callbacks"].items():
        callbacks.add_row(name, _shortened(state))
    for table in (about, files, variables, callbacks, _positions(parts)):
        console.print(table)
    return VALID


def _positions(parts: dict[str, Any]) -> "Table":
    table = _table("part", "batches read, by iterator", "how its position in the data is saved")
    for name, part in parts.items():
        if name.startswith("worker-"):
            data = part["input"]
            table.add_row(name, str(data["taken"]), _how_saved(data))
    return table


def _how_saved(data: dict[str, Any]) -> str:
    if not data["goes_on"]:
        return "at the beginning of an epoch"
    return "the iterator's checkpoint" if data["checkpoint"] else "batches are read again"


def _shortened(state: object) -> str:
    text = str(state)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _size_of(manifest: "Manifest") -> str:
    size = float(sum(record.size_bytes for record in manifest.files.values()))
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _table(*headings: str) -> "Table":
    from rich.table import Table

    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
