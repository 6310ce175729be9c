"""Backups as folders that are whole or absent: written aside, synced, hashed and renamed.

```
backup_dir/                     mode 0700
  backup-00000007/              complete: it has this name only once every byte is on disk
    manifest.json               size and SHA-256 of each file, and of the manifest itself
    shared.json  shared.safetensors  worker-0.json  worker-0.safetensors
  writing-00000008/             incomplete: what a killed process leaves, removed by the next save
```

A rename within a file system is atomic (POSIX), so a process killed anywhere leaves the previous
backups as they were. What is deleted is renamed first, for the same reason.
"""

import dataclasses
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

FORMAT = 1
_MANIFEST = "manifest.json"
_FOLDER = re.compile(r"(backup|writing|deleting)-(\d{8,})")
_FILE = re.compile(r"(shared|worker-\d+)\.(json|safetensors)|manifest\.json")


class BackupError(RuntimeError):
    """A backup could not be written, or none could be restored."""


class InvalidBackupError(BackupError):
    """One backup folder does not hold what its manifest says."""


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file."""

    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a backup folder holds.

    Attributes:
        about: what the writer said of the backup: epoch, batch, versions and so on.
        files: every file but the manifest, by name.
        sha256: of all of it; equal for equal backups.
    """

    about: Mapping
    files: Mapping[str, FileRecord]
    sha256: str


class Storage:
    """The backups of one folder, by number; a higher number is newer.

    Args:
        root: the folder; created by the first save. Nothing else should live in it: files of
            others are left alone, but their folders may not have names like `backup-00000001`.
    """

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root)

    def numbers(self) -> list[int]:
        """The numbers of the folders that claim to be complete, ascending."""
        return self._numbered("backup")

    def _numbered(self, kind: str) -> list[int]:
        if not self.root.exists():
            return []
        matches = [_FOLDER.fullmatch(name) for name in os.listdir(self.root)]
        return sorted(int(match[2]) for match in matches if match and match[1] == kind)

    def path(self, number: int, kind: str = "backup") -> Path:
        """The folder of a backup."""
        return self.root / f"{kind}-{number:08d}"

    # ---- writing ---------------------------------------------------------------------------------

    def begin(self) -> int:
        """Starts a new backup and removes what killed processes left; returns its number."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = self.numbers()
        for kind in ("writing", "deleting"):
            for leftover in self._numbered(kind):
                _remove(self.path(leftover, kind))
            taken += self._numbered(kind)  # those that hold files of others
        number = max(taken, default=0) + 1
        self.path(number, "writing").mkdir(mode=0o700)
        return number

    def write(
        self, number: int, files: Mapping[str, Iterable[bytes | memoryview]]
    ) -> dict[str, FileRecord]:
        """Writes and syncs files of a backup that was begun, in this process or another."""
        folder = self.path(number, "writing")
        return {name: _write_file(folder / name, content) for name, content in files.items()}

    def commit(self, number: int, files: Mapping[str, FileRecord], about: Mapping) -> None:
        """Makes a backup complete: its manifest is written and the folder gets its name."""
        content = {
            "format": FORMAT,
            "about": about,
            "files": {name: dataclasses.asdict(record) for name, record in files.items()},
        }
        content["sha256"] = _hash_of(content)
        folder = self.path(number, "writing")
        _write_file(folder / _MANIFEST, [json.dumps(content, indent=1).encode()])
        _sync_folder(folder)
        os.rename(folder, self.path(number))
        _sync_folder(self.root)

    def abandon(self, number: int) -> None:
        """Removes a backup that was begun and will not be committed."""
        _remove(self.path(number, "writing"))

    # ---- reading ---------------------------------------------------------------------------------

    def manifest(self, number: int) -> Manifest:
        """The manifest of a backup.

        Raises:
            InvalidBackupError: if it is damaged, or of a format this library does not read.
        """
        folder = self.path(number)
        if folder.is_symlink():
            raise InvalidBackupError(f"{folder} is a symbolic link, which a backup never is.")
        try:
            content = json.loads(_read_file(folder / _MANIFEST))
            found = content.pop("sha256")
            if found != _hash_of(content):
                raise ValueError("its SHA-256 differs")
            if content["format"] == FORMAT:
                files = {name: FileRecord(**record) for name, record in content["files"].items()}
                return Manifest(content["about"], files, found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidBackupError(f"{folder / _MANIFEST} is damaged: {error!r}.") from error
        raise InvalidBackupError(
            f"{folder} must have format {FORMAT}. Received: format {content['format']}, of "
            f"tfparallel {content['about'].get('tfparallel')}. Restore it with that version."
        )

    def read(self, number: int, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """The files `names` of a backup (None: all), each with the size and hash it should have.

        Raises:
            InvalidBackupError: naming the first file that is missing or differs.
        """
        records = self.manifest(number).files
        contents = {}
        for name in records if names is None else names:
            path = self.path(number) / name
            if name not in records or not _FILE.fullmatch(name):
                raise InvalidBackupError(f"{path} is not a file of this backup.")
            contents[name] = _read_file(path)
            received = _record_of(contents[name])
            if received != records[name]:
                raise InvalidBackupError(
                    f"{path} must have {records[name].size_bytes} bytes with SHA-256 "
                    f"{records[name].sha256}. Received: {received.size_bytes} bytes, "
                    f"{received.sha256}."
                )
        return contents

    # ---- deleting --------------------------------------------------------------------------------

    def delete(self, number: int) -> None:
        """Deletes a backup; files in it that are not ours stay, in the folder `deleting-N`."""
        doomed = self.path(number, "deleting")
        os.rename(self.path(number), doomed)
        _remove(doomed)

    def delete_all(self) -> None:
        """Deletes every backup, the newest last, and the folder if nothing else is in it."""
        for number in self.numbers():
            self.delete(number)
        try:
            self.root.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                raise


def _write_file(path: Path, content: Iterable[bytes | memoryview]) -> FileRecord:
    digest, size_bytes = hashlib.sha256(), 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        for chunk in content:
            digest.update(chunk)
            file.write(chunk)
            size_bytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size_bytes, digest.hexdigest())


def _read_file(path: Path) -> bytes:
    """The bytes of a regular file; nothing is read through a link, a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidBackupError(f"{path} is not a regular file.")
            return file.read()
    except OSError as error:
        reason = "a symbolic link is not followed" if error.errno == errno.ELOOP else error
        raise InvalidBackupError(f"{path} cannot be read: {reason}.") from error


def _record_of(data: bytes) -> FileRecord:
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def _hash_of(content: Mapping) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Removes a folder of ours, unless it holds anything that is not."""
    if folder.is_symlink():
        return
    for name in os.listdir(folder):
        if _FILE.fullmatch(name):
            os.unlink(folder / name)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
