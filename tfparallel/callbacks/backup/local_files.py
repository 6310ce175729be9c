"""The files of backups in a local or mounted folder, where a rename is atomic.

```
backup_dir/                     mode 0700
  backup-00000007/              complete: it has this name only once every byte is on disk
    manifest.json  shared.json  shared.safetensors  worker-0.json  worker-0.safetensors
  writing-00000008/             incomplete: what a killed process leaves, removed by the next save
  deleting-00000006/            renamed before its files go, for the same reason
```
"""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from tfparallel.callbacks.backup.backup_names import FILE, folder_name, numbered


class LocalFiles:
    """See `storage.Files` for the methods.

    Args:
        root: the folder; created by the first `begin`.
    """

    def __init__(self, root: Path):
        self._root = root

    def numbers(self) -> list[int]:
        return [n for n in self._numbered("backup") if self.path(n).is_dir()]

    def path(self, number: int, kind: str = "backup") -> Path:
        return self._root / folder_name(kind, number)

    def begin(self) -> int:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = self._numbered("backup")
        for kind in ("writing", "deleting"):
            for leftover in self._numbered(kind):
                _remove(self.path(leftover, kind))
            taken += self._numbered(kind)  # those that are not ours, or hold files of others
        number = max(taken, default=0) + 1
        self.path(number, "writing").mkdir(mode=0o700)
        return number

    def write(self, number: int, name: str, content: Iterable[bytes | memoryview]) -> None:
        path = self.path(number, "writing") / name
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for chunk in content:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, number: int) -> None:
        folder = self.path(number, "writing")
        _sync_folder(folder)
        os.rename(folder, self.path(number))
        _sync_folder(self._root)

    def abandon(self, number: int) -> None:
        _remove(self.path(number, "writing"))

    def read(self, number: int, name: str, largest_bytes: int) -> bytes:
        """Nothing is read through a link, a pipe or a device."""
        folder = self.path(number)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link is not followed", str(folder))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(folder / name, flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                error.strerror = "a symbolic link is not followed"
            raise
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(folder / name))
            if status.st_size > largest_bytes:
                raise too_large(folder / name, status.st_size, largest_bytes)
            return file.read()

    def delete(self, number: int) -> None:
        doomed = self.path(number, "deleting")
        os.rename(self.path(number), doomed)
        _remove(doomed)

    def delete_root(self) -> None:
        try:
            self._root.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                raise

    def _numbered(self, kind: str) -> list[int]:
        return numbered(os.listdir(self._root), kind) if self._root.exists() else []


def too_large(path: object, size_bytes: int, largest_bytes: int) -> OSError:
    """The error of a file that is not read, since it cannot be the one that was written."""
    text = f"{size_bytes} bytes, of {largest_bytes} at the most"
    return OSError(errno.EFBIG, text, str(path))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Removes a folder of ours, unless it holds anything that is not."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for name in os.listdir(folder):
        if FILE.fullmatch(name):
            os.unlink(folder / name)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
