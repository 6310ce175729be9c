"""Callbacks for `Model.fit`.

They load on first use, so that the command line reads backups without TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfparallel.callbacks.backup.resumable import resumable
from tfparallel.callbacks.backup.storage import BackupError, LeaseError

if TYPE_CHECKING:
    from tfparallel.callbacks.backup.callback import BackupAndRestore
    from tfparallel.callbacks.measure import Measure

__all__ = ["BackupAndRestore", "BackupError", "LeaseError", "Measure", "resumable"]

_MODULES = {
    "BackupAndRestore": "tfparallel.callbacks.backup.callback",
    "Measure": "tfparallel.callbacks.measure",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tfparallel.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
