"""The files of backups in a store that fsspec reaches: `gs://`, `s3://`, `memory://` and others.

Such stores cannot rename a folder at once. There a mark, an object beside the folder, says that a
backup does not count; making and deleting one object is atomic.

```
gs://bucket/run/
  backup-00000007/shared.json ...
  backup-00000008/shared.json ...        does not count: begun, or half deleted
  writing-00000008                       its mark; `publish` deletes it, as the last thing
```

A backup that is deleted gets its mark, `deleting-N`, first.
"""

import contextlib
import importlib
import posixpath
from collections.abc import Iterable
from typing import Any

from tfparallel.callbacks.backup.backup_names import FILE, folder_name, numbered
from tfparallel.callbacks.backup.local_files import too_large


class RemoteFiles:
    """See `storage.Files` for the methods.

    Args:
        url: the folder, as fsspec understands it.

    Raises:
        ImportError: if fsspec, or its plug-in for this kind of URL, is not installed.
    """

    def __init__(self, url: str):
        try:
            fsspec: Any = importlib.import_module("fsspec")
        except ImportError as error:
            raise ImportError(
                f"A backup_dir that is a URL needs fsspec. Received: {url!r}. Run `pip install "
                "fsspec` and, for gs:// or s3://, gcsfs or s3fs; or use a local folder."
            ) from error
        self._url = url
        self._store: Any
        self._store, self._root = fsspec.url_to_fs(url)

    def numbers(self) -> list[int]:
        names = self._names()
        marked = {*numbered(names, "writing"), *numbered(names, "deleting")}
        return [number for number in numbered(names, "backup") if number not in marked]

    def path(self, number: int, kind: str = "backup") -> str:
        return f"{self._url.rstrip('/')}/{folder_name(kind, number)}"

    def begin(self) -> int:
        names = self._names()
        for kind in ("writing", "deleting"):
            for leftover in numbered(names, kind):
                self._remove(leftover, kind)
        number = max(numbered(self._names(), "backup"), default=0) + 1
        self._store.makedirs(self._root, exist_ok=True)
        self._store.pipe_file(self._object(number, "writing"), b"")
        self._store.makedirs(self._object(number), exist_ok=True)
        return number

    def write(self, number: int, name: str, content: Iterable[bytes | memoryview]) -> None:
        with self._store.open(f"{self._object(number)}/{name}", "wb") as file:
            for chunk in content:
                file.write(chunk)

    def publish(self, number: int) -> None:
        self._store.rm_file(self._object(number, "writing"))

    def abandon(self, number: int) -> None:
        self._remove(number, "writing")

    def read(self, number: int, name: str, largest_bytes: int) -> bytes:
        path = f"{self._object(number)}/{name}"
        if (size_bytes := self._store.size(path)) > largest_bytes:
            raise too_large(path, size_bytes, largest_bytes)
        return self._store.cat_file(path)

    def delete(self, number: int) -> None:
        self._store.pipe_file(self._object(number, "deleting"), b"")
        self._remove(number, "deleting")

    def delete_root(self) -> None:
        if not self._names():
            self._remove_folder(self._root)

    def _object(self, number: int, kind: str = "backup") -> str:
        return f"{self._root.rstrip('/')}/{folder_name(kind, number)}"

    def _names(self, folder: str = "") -> list[str]:
        """What lies in a folder of the root, fresh from the store; nothing where it is missing."""
        self._store.invalidate_cache()
        try:
            paths = self._store.ls(folder or self._root, detail=False)
        except FileNotFoundError:
            return []
        return [posixpath.basename(path.rstrip("/")) for path in paths]

    def _remove(self, number: int, kind: str) -> None:
        """Removes our files of a backup that has a mark, and then the mark."""
        folder = self._object(number)
        names = self._names(folder)
        for name in filter(FILE.fullmatch, names):
            self._store.rm_file(f"{folder}/{name}")
        if all(map(FILE.fullmatch, names)):
            self._remove_folder(folder)
            self._store.rm_file(self._object(number, kind))

    def _remove_folder(self, folder: str) -> None:
        # Object stores have no folders: there it went with its last object.
        with contextlib.suppress(OSError, NotImplementedError):
            self._store.rmdir(folder)
