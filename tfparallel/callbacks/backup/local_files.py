"""The files of backups in a local or mounted folder, where a rename is atomic.

```
backup_dir/                     mode 0700
  backup-00000007/              complete: it has this name only once every byte is on disk
    manifest.json  shared.json  shared.safetensors  worker-0.json  worker-0.safetensors
  writing-00000008-TOKEN-2/     incomplete: what a killed process leaves, removed by the next save
  deleting-00000006/            renamed before its files go, for the same reason
  lease-00000002                whose the folder is; TOKEN and 2 are its owner's (`lease.py`)
```
"""

import contextlib
import errno
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
    swept,
    unfinished_claim,
)
from tfparallel.callbacks.backup.disk import Disk, SystemDisk
from tfparallel.callbacks.backup.lease import LARGEST_CLAIM_BYTES, Claim

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_SYNC = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EROFS, errno.ENOSYS)
_NO_CLAIM = (errno.EFBIG, errno.EINVAL, errno.ELOOP)


class LocalFiles:
    """See `storage.Files` for the methods.

    Args:
        root: the folder; created by the first `begin`.
        disk: where it is.
    """

    def __init__(self, root: Path, disk: Disk | None = None):
        self._root, self._disk = root, SystemDisk() if disk is None else disk

    def numbers(self) -> list[int]:
        return [n for n in self._numbered("backup") if self._disk.is_folder(self.path(n))]

    def path(self, number: int, kind: str = "backup") -> Path:
        return self._root / folder_name(kind, number)

    def sweep(self, token: str = "", fence: int = 0) -> int:
        """A draft gets another name at once: a process that slept cannot publish half of it."""
        for draft in (doomed := swept(names := self._names(), token, fence)):
            self._move(self._root / draft.name("writing"), self._root / draft.name("deleting"))
        if deleted := drafts(self._names(), "deleting"):
            self._disk.sync_folder(self._root)  # whoever has renamed them may have died before this
        for kind, leftovers in (("writing", doomed), ("deleting", deleted)):
            for leftover in leftovers:
                self._remove(self._root / leftover.name(kind))
        for unfinished in filter(CLAIMING.fullmatch, names):
            self._disk.remove_file(self._root / unfinished)
        return max((n.number for k in KINDS for n in drafts(names, k)), default=0)

    def begin(self, token: str, fence: int, above: int) -> Draft:
        self._disk.make_folders(self._root)
        highest = self.sweep(token, fence) if token else self._highest_left()
        draft = Draft(max(highest, above) + 1, token, fence)
        self._disk.make_folder(self._root / draft.name("writing"))
        return draft

    def _highest_left(self) -> int:
        """After a sweep; without a lease, what was begun and never counted is counted again."""
        self.sweep()
        names = self._names()  # those that are not ours, or hold others' files, too
        return max((n.number for k in KINDS for n in drafts(names, k)), default=0)

    def probe(self) -> None:
        self._disk.make_folders(self._root)
        path = self._root / unfinished_claim(0, self._disk.drawn_name())
        try:
            self._disk.write_new(path, [b"probe"])
        finally:
            self._disk.remove_file(path)

    def write(self, draft: Draft, name: str, content: Iterable[bytes | memoryview]) -> None:
        self._disk.write_new(self._root / draft.name("writing") / name, content)

    def publish(self, draft: Draft) -> None:
        folder = self._root / draft.name("writing")
        self._disk.sync_folder(folder)
        self._disk.rename(folder, self.path(draft.number))
        self._disk.sync_folder(self._root)

    def abandon(self, draft: Draft) -> None:
        self._remove(self._root / draft.name("writing"))

    def size(self, number: int, name: str) -> int:
        return self._disk.size(self.path(number) / name)

    def read(self, number: int, name: str, largest_bytes: int) -> bytes:
        """Nothing is read through a link, a pipe or a device."""
        folder = self.path(number)
        if self._disk.is_link(folder):
            raise OSError(errno.ELOOP, "a symbolic link is not followed", str(folder))
        return self._disk.read(folder / name, largest_bytes)

    def delete(self, number: int) -> None:
        doomed = self.path(number, "deleting")
        with contextlib.suppress(FileNotFoundError):  # another owner of the folder was quicker
            self._disk.rename(self.path(number), doomed)
            self._disk.sync_folder(self._root)  # before its files go, also for a power failure
        self._remove(doomed)

    def claims(self) -> list[int]:
        return self._numbered("lease")

    def read_claim(self, fence: int) -> bytes:
        try:
            return self._disk.read(self.path(fence, "lease"), LARGEST_CLAIM_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            if error.errno not in _NO_CLAIM:
                raise
            return b"nothing that we write"

    def create_claim(self, fence: int, data: bytes) -> bool:
        """A link to a whole file: it is there with all its bytes, or not at all."""
        self._make_root()
        unfinished = self._root / unfinished_claim(fence, self._disk.drawn_name())
        try:
            self._disk.write_new(unfinished, [data])
            return self._link_new(unfinished, self.path(fence, "lease"), data)
        except FileNotFoundError:  # the one who got it has swept, or removed the folder
            return False
        finally:
            self._disk.remove_file(unfinished)

    def rewrite_claim(self, fence: int, data: bytes) -> None:
        """In place, so that a full disk stops no heartbeat.

        Who slept while all was deleted and the folder taken anew finds a claim of the same number.
        """
        claim = Claim.from_bytes(fence, data)

        def is_ours(before: bytes) -> bool:
            found = Claim.from_bytes(fence, before)
            return found is None or claim is None or found.token == claim.token

        self._disk.rewrite(self.path(fence, "lease"), data, is_ours)

    def delete_claim(self, fence: int) -> None:
        self._disk.remove_file(self.path(fence, "lease"))

    def accepted(self) -> None:
        return None  # a draft that was swept away cannot be published

    def delete_root(self) -> None:
        try:
            self._disk.remove_folder(self._root)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                raise

    def _make_root(self) -> None:
        """Its name is on the disk, too: else a power failure takes all backups with it."""
        self._disk.make_folders(self._root)
        for folder in self._root.parents:  # whoever has made it may have died before this
            try:
                self._disk.sync_folder(folder)
            except OSError as error:
                if error.errno not in _NO_SYNC:
                    raise

    def _names(self) -> list[str]:
        """What is there; nothing where another owner has removed the folder."""
        try:
            return self._disk.names(self._root)
        except FileNotFoundError:
            return []

    def _numbered(self, kind: str) -> list[int]:
        return numbered(self._names(), kind)

    def _link_new(self, source: Path, path: Path, data: bytes) -> bool:
        """Gives a file a second name unless the name is taken; whether it did."""
        try:
            try:
                self._disk.link(source, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # Who reads it half written takes it for damaged, and waits.
                self._disk.write_new(path, [data])
        except FileExistsError:
            return False
        return True

    def _move(self, folder: Path, target: Path) -> None:
        """Gives a folder another name; leaves what is none, or would lie on files of others."""
        if self._is_own_folder(folder):
            try:
                self._disk.rename(folder, target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise

    def _remove(self, folder: Path) -> None:
        """Removes a folder of ours, unless it holds anything that is not.

        Whoever takes the folder over removes what another has begun to remove: what is gone is
        gone.
        """
        if not self._is_own_folder(folder):
            return
        with contextlib.suppress(FileNotFoundError):
            for name in filter(FILE.fullmatch, self._disk.names(folder)):
                self._disk.remove_file(folder / name)
            try:
                self._disk.remove_folder(folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def _is_own_folder(self, path: Path) -> bool:
        return self._disk.is_folder(path) and not self._disk.is_link(path)
