"""Callbacks for `Model.fit`."""

from tfparallel.callbacks.backup import BackupAndRestore
from tfparallel.callbacks.storage import BackupError

__all__ = ["BackupAndRestore", "BackupError"]
