"""Writing one backup together: it counts once every worker has finished its part.

```
            chief                               every other worker
 begin      makes the folder  --- number --->
 parts      shared, worker-0                    worker-r
            <------------ hashes of the files, or an error ------------>
 commit     manifest, a last look at its lease, rename
                              --- done ----->
```

A worker that fails or dies before `commit` leaves the backups before this one as they were.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from tfparallel.callbacks.backup.backup_names import Draft
from tfparallel.callbacks.backup.held_lease import Lease
from tfparallel.callbacks.backup.part import BackupPart
from tfparallel.callbacks.backup.schema import FileRecord
from tfparallel.callbacks.backup.storage import BackupError, LeaseError, Storage
from tfparallel.callbacks.backup.workers import exchange
from tfparallel.coordination.agreement import Agreement


def write_backup(
    storage: Storage,
    agreement: Agreement | None,
    rank: int,
    parts: Mapping[str, BackupPart],
    about: Mapping[str, object],
    keep: int,
    lease: Lease | None,
) -> int:
    """Writes a backup, with all workers.

    Args:
        storage: the folder, the same for all workers.
        agreement: between the workers; None for one.
        rank: this worker's; 0 is the chief.
        parts: what this worker writes, by name.
        about: for the manifest; the chief's counts.
        keep: how many backups stay, this one included.
        lease: the chief's right to do so.

    Returns:
        Its number.

    Raises:
        BackupError: on every worker, if any of them could not do its part.
        LeaseError: on every worker, if another training has the folder.
    """
    draft = Draft(*_together(agreement, "begin a backup", lease.begin if lease else _nothing)[0])

    def write() -> dict[str, list]:
        files: dict[str, FileRecord] = {}
        for name, part in parts.items():
            files |= storage.write(draft, part.files(name))
        return {name: [record.size_bytes, record.sha256] for name, record in files.items()}

    try:
        written = _together(agreement, "write its part of a backup", write)
        records = {
            name: FileRecord(size_bytes=size_bytes, sha256=sha256)
            for files in written
            for name, (size_bytes, sha256) in files.items()
        }

        def commit() -> None:
            assert lease is not None
            storage.commit(draft, records, about, check=lease.require)

        _together(agreement, "commit a backup", commit if lease else _nothing)
    except BaseException:
        if lease is not None:
            if draft.number not in storage.numbers():
                with contextlib.suppress(OSError):  # the next backup tries again
                    storage.abandon(draft)
            lease.require()  # who has lost the folder finds its files gone: say why
        raise
    if lease is not None:
        delete_old(storage, keep, check=lease.require)
    return draft.number


def delete_old(storage: Storage, keep: int, check: Callable[[], None] = lambda: None) -> None:
    """Deletes what is older than the newest `keep` backups; damaged ones do not count as such.

    Args:
        storage: the folder.
        keep: how many stay.
        check: called before each deletion; what it raises leaves the rest.
    """
    whole = [number for number in storage.numbers() if storage.is_whole(number)]
    for old in storage.numbers():
        if len(whole) >= keep and old < whole[-keep]:
            check()
            storage.delete(old)


def _together(agreement: Agreement | None, kind: str, work: Callable[[], object]) -> list:
    """What `work` returned on every worker, by rank; an error on all if it failed on any."""
    error: Exception | None = None
    result: dict[str, Any]
    try:
        result = {"done": work()}
    except LeaseError as failure:
        error, result = failure, {"error": str(failure), "is_lease": True}
    except Exception as failure:
        error, result = failure, {"error": f"{type(failure).__name__}: {failure}"}
    results = exchange(agreement, kind, result)
    if any("is_lease" in result for result in results):
        raise LeaseError(next(r["error"] for r in results if "is_lease" in r)) from error
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
