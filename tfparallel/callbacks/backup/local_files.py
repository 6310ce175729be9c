"""The files of backups in a local or mounted folder, where a rename is atomic.

```
backup_dir/                     mode 0700
  backup-00000007/              complete: it has this name only once every byte is on disk
    manifest.json  shared.json  shared.safetensors  worker-0.json  worker-0.safetensors
  writing-00000008-TOKEN/       incomplete: what a killed process leaves, removed by the next save
  deleting-00000006/            renamed before its files go, for the same reason
  lease-00000002                whose the folder is; TOKEN is its owner's (`lease.py`)
```
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from tfparallel.callbacks.backup.backup_names import (
    CLAIMING,
    FILE,
    KINDS,
    Draft,
    drafts,
    folder_name,
    numbered,
)
from tfparallel.callbacks.backup.lease import LARGEST_CLAIM_BYTES

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


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

    def sweep(self) -> int:
        """A draft gets another name at once: a process that slept cannot publish half of it."""
        if not self._root.exists():
            return 0
        for name in drafts(names := os.listdir(self._root), "writing"):
            _move(self._root / name.name("writing"), self._root / name.name("deleting"))
        for kind in ("writing", "deleting"):
            for leftover in drafts(os.listdir(self._root), kind):
                _remove(self._root / leftover.name(kind))
        for unfinished in filter(CLAIMING.fullmatch, names):
            (self._root / unfinished).unlink(missing_ok=True)
        return max((n.number for k in KINDS for n in drafts(names, k)), default=0)

    def begin(self, token: str, above: int) -> Draft:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = Draft(max(self.sweep() if token else self._highest_left(), above) + 1, token)
        (self._root / draft.name("writing")).mkdir(mode=0o700)
        return draft

    def _highest_left(self) -> int:
        """After a sweep; without a lease, what was begun and never counted is counted again."""
        self.sweep()
        names = os.listdir(self._root)  # those that are not ours, or hold files of others, too
        return max((n.number for k in KINDS for n in drafts(names, k)), default=0)

    def write(self, draft: Draft, name: str, content: Iterable[bytes | memoryview]) -> None:
        path = self._root / draft.name("writing") / name
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for chunk in content:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, draft: Draft) -> None:
        folder = self._root / draft.name("writing")
        _sync_folder(folder)
        os.rename(folder, self.path(draft.number))
        _sync_folder(self._root)

    def abandon(self, draft: Draft) -> None:
        _remove(self._root / draft.name("writing"))

    def size(self, number: int, name: str) -> int:
        return os.lstat(self.path(number) / name).st_size

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
        with contextlib.suppress(FileNotFoundError):  # another owner of the folder was quicker
            os.rename(self.path(number), doomed)
        _remove(doomed)

    def claims(self) -> list[int]:
        return self._numbered("lease")

    def read_claim(self, fence: int) -> bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with open(os.open(self.path(fence, "lease"), flags), "rb") as file:
                return file.read(LARGEST_CLAIM_BYTES)
        except FileNotFoundError:
            return b""

    def create_claim(self, fence: int, data: bytes) -> bool:
        """A link to a whole file: it is there with all its bytes, or not at all."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self._root / f"claiming-{fence:08d}-{secrets.token_hex(8)}"
        try:
            _write_new(unfinished, data)
            return _link_new(unfinished, self.path(fence, "lease"), data)
        except FileNotFoundError:  # the one who got it has swept, or removed the folder
            return False
        finally:
            unfinished.unlink(missing_ok=True)

    def rewrite_claim(self, fence: int, data: bytes) -> None:
        """In place, so that a full disk stops no heartbeat."""
        flags = os.O_WRONLY | os.O_NOFOLLOW
        with open(os.open(self.path(fence, "lease"), flags), "wb", buffering=0) as file:
            file.write(data)
            file.truncate(len(data))
            os.fsync(file.fileno())

    def delete_claim(self, fence: int) -> None:
        self.path(fence, "lease").unlink(missing_ok=True)

    def accepted(self) -> None:
        return None  # a draft that was swept away cannot be published

    def delete_root(self) -> None:
        try:
            self._root.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                raise

    def _numbered(self, kind: str) -> list[int]:
        return numbered(os.listdir(self._root), kind) if self._root.exists() else []


def _write_new(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link_new(source: Path, path: Path, data: bytes) -> bool:
    """Gives a file a second name unless the name is taken; whether it did."""
    try:
        try:
            os.link(source, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write_new(path, data)  # who reads it half written takes it for damaged, and waits
    except FileExistsError:
        return False
    return True


def _move(folder: Path, target: Path) -> None:
    """Gives a folder another name; leaves what is no folder, or would lie on files of others."""
    if folder.is_dir() and not folder.is_symlink():
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise


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
    """Removes a folder of ours, unless it holds anything that is not.

    Whoever takes the folder over removes what another has begun to remove: what is gone is gone.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):
        for name in filter(FILE.fullmatch, os.listdir(folder)):
            (folder / name).unlink(missing_ok=True)
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
