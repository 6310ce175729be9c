"""Writing one backup together: it counts once every worker has finished its part.

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

from tfparallel.callbacks.backup.part import BackupPart
from tfparallel.callbacks.backup.schema import FileRecord
from tfparallel.callbacks.backup.storage import BackupError, Storage
from tfparallel.callbacks.backup.workers import exchange
from tfparallel.coordination.agreement import Agreement


def write_backup(
    storage: Storage,
    agreement: Agreement | None,
    rank: int,
    parts: Mapping[str, BackupPart],
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
        records = {
            name: FileRecord(size_bytes=size_bytes, sha256=sha256)
            for files in written
            for name, (size_bytes, sha256) in files.items()
        }

        def commit() -> None:
            storage.commit(number, records, about)

        _together(agreement, "commit a backup", commit if is_chief else _nothing)
    except BaseException:
        if is_chief and number not in storage.numbers():
            with contextlib.suppress(OSError):  # the next backup tries again
                storage.abandon(number)
        raise
    if is_chief:
        delete_old(storage, keep)


def delete_old(storage: Storage, keep: int) -> None:
    """Deletes what is older than the newest `keep` backups; damaged ones do not count as such."""
    whole = [number for number in storage.numbers() if storage.is_whole(number)]
    for old in storage.numbers():
        if len(whole) >= keep and old < whole[-keep]:
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
