"""Starting the processes of a job: `tfparallel launch`, and `notebook` from Python."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfparallel.launch.from_python import notebook

__all__ = ["notebook"]


def __getattr__(name: str) -> Any:
    if name != "notebook":
        raise AttributeError(f"module 'tfparallel.launch' has no attribute {name!r}")
    from tfparallel.launch.from_python import notebook

    return notebook
