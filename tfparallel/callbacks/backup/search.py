"""Finding the newest backup that is valid on all workers."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfparallel.callbacks.backup.part import BackupPart, read_part
from tfparallel.callbacks.backup.saved_shards import read_shards
from tfparallel.callbacks.backup.storage import BackupError, InvalidBackupError, Manifest, Storage
from tfparallel.callbacks.backup.workers import Workers, exchange


class FoundBackup(NamedTuple):
    """What this worker needs of a backup.

    Attributes:
        parts: by name: the shared one and this worker's own; those of all workers if another number
            of workers wrote it.
        shards: of each variable that is saved in shards, by position, what it asked for, flat.
    """

    parts: dict[str, BackupPart]
    shards: dict[int, np.ndarray]


def find_backup(
    storage: Storage, workers: Workers, range_of: Callable[[int, int], tuple[int, int]]
) -> FoundBackup | None:
    """The newest backup that is valid on all workers, or None if there never was one.

    Args:
        storage: the folder, the same for all workers.
        workers: this worker and its peers, which all search at the same time.
        range_of: what this worker needs of a flat variable, by its position and its size.

    Raises:
        BackupError: if there are backups and none is valid, or workers see different ones.
    """
    agreement = workers.agreement("find")
    found, problems = _newest_valid(storage, workers, range_of, limit=None)
    for problem in problems:
        tf.get_logger().error("Backup left out, an older one is tried. %s", problem)
    limits = exchange(agreement, "find a backup", found and found[0])
    numbers = [limit for limit in limits if limit is not None]
    if not numbers and not any(exchange(agreement, "count backups", len(problems))):
        return None
    if found is not None and len(numbers) == len(limits) and found[0] > min(numbers):
        found, _ = _newest_valid(storage, workers, range_of, limit=min(numbers))
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
    return found[2]


def _newest_valid(
    storage: Storage, workers: Workers, range_of: Callable, limit: int | None
) -> tuple[tuple[int, Manifest, FoundBackup] | None, list[str]]:
    """The newest whole backup, not above number `limit`; and what is wrong with newer ones."""
    problems: list[str] = []
    for number in reversed(storage.numbers()):
        if limit is not None and number > limit:
            continue
        try:
            manifest = storage.manifest(number)
            parts = _read_parts(storage, number, manifest, workers)
            shards = read_shards(storage, number, parts["shared"]["model"], range_of)
            return (number, manifest, FoundBackup(parts, shards)), problems
        except InvalidBackupError as error:
            problems.append(str(error))
    return None, problems


def _read_parts(
    storage: Storage, number: int, manifest: Manifest, workers: Workers
) -> dict[str, BackupPart]:
    own = [f"worker-{workers.rank}"]
    if manifest.about["num_workers"] != workers.num_workers:
        own = [f"worker-{rank}" for rank in range(manifest.about["num_workers"])]
    parts = {}
    for name in ["shared", *own]:
        parts[name] = read_part(storage, number, name)
    return parts
