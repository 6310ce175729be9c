"""Callbacks for `Model.fit`.

They load on first use, so that the command line reads backups without TensorFlow.
"""

from typing import TYPE_CHECKING, Any

from tfparallel.callbacks.backup.resumable import resumable
from tfparallel.callbacks.backup.storage import BackupError, LeaseError

if TYPE_CHECKING:
    from tfparallel.callbacks.backup.callback import BackupAndRestore

__all__ = ["BackupAndRestore", "BackupError", "LeaseError", "resumable"]


def __getattr__(name: str) -> Any:
    if name != "BackupAndRestore":
        raise AttributeError(f"module 'tfparallel.callbacks' has no attribute {name!r}")
    from tfparallel.callbacks.backup.callback import BackupAndRestore

    return BackupAndRestore


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
