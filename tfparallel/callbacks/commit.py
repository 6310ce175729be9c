"""Writing and finding one backup together: it counts once every worker has finished its part.

```
            chief                               every other worker
 begin      makes the folder  --- number --->
 parts      shared, worker-0                    worker-r
            <------------ hashes of the files, or an error ------------>
 commit     manifest, rename  --- done ----->
```

A worker that fails or dies before `commit` leaves the backups before this one as they were.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfparallel.callbacks.part import Part
from tfparallel.callbacks.storage import (
    BackupError,
    FileRecord,
    InvalidBackupError,
    Manifest,
    Storage,
)
from tfparallel.callbacks.workers import Workers, exchange
from tfparallel.communication.agreement import Agreement


def write_backup(
    storage: Storage,
    agreement: Agreement | None,
    rank: int,
    parts: Mapping[str, Part],
    about: Mapping[str, Any],
    keep: int,
) -> None:
    """Writes a backup, with all workers.

    Args:
        storage: the folder, the same for all workers.
        agreement: between the workers; None for one.
        rank: this worker's; 0 is the chief.
        parts: what this worker writes, by name.
        about: for the manifest; the chief's counts.
        keep: how many backups stay, this one included.

    Raises:
        BackupError: on every worker, if any of them could not do its part.
    """
    is_chief = rank == 0
    number = _together(agreement, "begin a backup", storage.begin if is_chief else _nothing)[0]

    def write() -> dict[str, list]:
        files: dict[str, FileRecord] = {}
        for name, part in parts.items():
            files |= storage.write(number, part.files(name))
        return {name: [record.size_bytes, record.sha256] for name, record in files.items()}

    try:
        written = _together(agreement, "write its part of a backup", write)
        records = {name: FileRecord(*r) for files in written for name, r in files.items()}

        def commit() -> None:
            storage.commit(number, records, about)

        _together(agreement, "commit a backup", commit if is_chief else _nothing)
    except BaseException:
        if is_chief and number not in storage.numbers():
            with contextlib.suppress(OSError):  # the next backup tries again
                storage.abandon(number)
        raise
    if is_chief:
        for old in storage.numbers()[:-keep]:
            storage.delete(old)


def _together(agreement: Agreement | None, kind: str, work: Callable[[], Any]) -> list:
    """What `work` returned on every worker, by rank; an error on all if it failed on any."""
    error = None
    try:
        result = {"done": work()}
    except Exception as failure:
        error, result = failure, {"error": f"{type(failure).__name__}: {failure}"}
    results = exchange(agreement, kind, result)
    failed = [f"rank {i}: {r['error']}" for i, r in enumerate(results) if "error" in r]
    if failed:
        where = "" if agreement is None else "All workers must see the same backup_dir. "
        raise BackupError(
            f"Could not {kind}. {where}The backups before it are as they were. "
            f"Received: {'; '.join(failed)}."
        ) from error
    return [r["done"] for r in results]


def _nothing() -> None:
    return None


def find_backup(
    storage: Storage, agreement: Agreement | None, workers: Workers
) -> tuple[Manifest, dict[str, Part]] | None:
    """The newest backup that is valid on all workers, or None if there never was one.

    Returns:
        Its manifest, and its parts by name: the shared one and this worker's own; those of all
        workers if another number of workers wrote it.

    Raises:
        BackupError: if there are backups and none is valid, or workers see different ones.
    """
    found, problems = _newest_valid(storage, workers, limit=None)
    for problem in problems:
        tf.get_logger().error("Backup left out, an older one is tried. %s", problem)
    limits = exchange(agreement, "find a backup", found and found[0])
    numbers = [limit for limit in limits if limit is not None]
    if not numbers and not any(exchange(agreement, "count backups", len(problems))):
        return None
    if found is not None and len(numbers) == len(limits) and found[0] > min(numbers):
        found, _ = _newest_valid(storage, workers, limit=min(numbers))
    chosen = exchange(agreement, "choose a backup", found and [found[0], found[1].sha256])
    if found is None or any(other != chosen[0] for other in chosen):
        seen = [
            f"rank {rank}: {'none' if one is None else f'backup {one[0]} ({one[1][:12]})'}"
            for rank, one in enumerate(chosen)
        ]
        raise BackupError(
            f"Expected one backup in {storage.root} that is valid for all workers. Received: "
            f"{'; '.join(seen)}. {' '.join(problems)} Put the missing files back, or start anew "
            "with an empty backup_dir: what is there is left as it is."
        )
    return found[1], found[2]


def _newest_valid(
    storage: Storage, workers: Workers, limit: int | None
) -> tuple[tuple[int, Manifest, dict[str, Part]] | None, list[str]]:
    """The newest whole backup, not above number `limit`; and what is wrong with newer ones."""
    problems: list[str] = []
    for number in reversed(storage.numbers()):
        if limit is not None and number > limit:
            continue
        try:
            manifest = storage.manifest(number)
            return (number, manifest, _read_parts(storage, number, manifest, workers)), problems
        except InvalidBackupError as error:
            problems.append(str(error))
    return None, problems


def _read_parts(
    storage: Storage, number: int, manifest: Manifest, workers: Workers
) -> dict[str, Part]:
    own = [f"worker-{workers.rank}"]
    if manifest.about["num_workers"] != workers.num_workers:
        own = [f"worker-{rank}" for rank in range(manifest.about["num_workers"])]
    parts = {}
    for name in ["shared", *own]:
        contents = storage.read(number, [f"{name}.json", f"{name}.safetensors"])
        parts[name] = Part.from_files(name, contents)
    return parts
