"""Backups that are whole or absent: hashed, and read only if every byte is as it was.

Where files lie, and how several of them become a backup at once, is `Files`: a local folder
(`local_files.py`) or an object store (`remote_files.py`).
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from tfparallel.callbacks.backup.backup_names import FILE, MANIFEST, Draft
from tfparallel.callbacks.backup.disk import Disk
from tfparallel.callbacks.backup.local_files import LocalFiles
from tfparallel.callbacks.backup.remote_files import ObjectStore, RemoteFiles
from tfparallel.callbacks.backup.schema import (
    LARGEST_MANIFEST_BYTES,
    FileRecord,
    ManifestContent,
    parse_json,
)

FORMAT = 1
SHARDED_FORMAT = 2  # of backups with parts of variables: versions that cannot join them say so


class BackupError(RuntimeError):
    """A backup could not be written, or none could be restored."""


class LeaseError(BackupError):
    """Another training has the folder, or has taken it over."""


class InvalidBackupError(BackupError):
    """One backup folder does not hold what its manifest says."""


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


class Files(Protocol):
    """The files of numbered backups. A process killed anywhere leaves all others as they were.

    Whatever `begin` finds that was begun or half deleted, it removes. Files that are not ours (by
    their names) are never removed. All methods raise `OSError`.
    """

    def numbers(self) -> list[int]:
        """The numbers of the backups that were published and not deleted, ascending."""

    def path(self, number: int, kind: str = "backup") -> Path | str:
        """Where a backup lies, for messages."""

    def sweep(self, token: str = "", fence: int = 0) -> int:
        """Removes what was begun (see `swept`), or half deleted.

        Args:
            token, fence: of the owner's lease, if it has one.

        Returns:
            The highest number there has been.
        """

    def begin(self, token: str, fence: int, above: int) -> Draft:
        """Makes room for a backup, with a number above all others and above `above`."""

    def probe(self) -> None:
        """Writes a small file and removes it."""

    def write(self, draft: Draft, name: str, content: Iterable[bytes | memoryview]) -> None:
        """Writes a file of a backup that was begun; it is on the disk when this returns."""

    def publish(self, draft: Draft) -> None:
        """Makes a backup count, all of its files at once; fails if it was swept away."""

    def abandon(self, draft: Draft) -> None:
        """Removes a backup that was begun."""

    def size(self, number: int, name: str) -> int:
        """The bytes of a file."""

    def read(self, number: int, name: str, largest_bytes: int) -> bytes:
        """The bytes of a regular file; an error, before any is read, if there are more."""

    def delete(self, number: int) -> None:
        """Makes a backup not count, all of its files at once, then removes them."""

    def delete_root(self) -> None:
        """Removes the folder of all backups if nothing is in it."""

    # Claims, `lease-00000001`: see `lease.py`.

    def claims(self) -> list[int]:
        """The fencing numbers of all claims, ascending."""

    def read_claim(self, fence: int) -> bytes:
        """What a claim holds; nothing if it has gone."""

    def create_claim(self, fence: int, data: bytes) -> bool:
        """Makes a claim, whole, unless there is one with this number; whether it did."""

    def rewrite_claim(self, fence: int, data: bytes) -> None:
        """Changes a claim that is there; needs no more space, where that can be had."""

    def delete_claim(self, fence: int) -> None:
        """Removes a claim that may have gone."""

    def accepted(self) -> list[Draft] | None:
        """The backups that count now; None where no other can appear later (see `counting`)."""


class Storage:
    """The backups of one folder, by number; a higher number is newer.

    Args:
        root: a folder, or a URL for fsspec ("gs://bucket/run"); created by the first save. Nothing
            else should live in it: files of others are left alone, but their folders may not have
            names like `backup-00000001`.
        disk: where a folder is; by default what this machine has mounted there.
        store: where a URL is; by default what fsspec finds there.
        sleep: pauses between requests to a store that are made again, s.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        disk: Disk | None = None,
        store: ObjectStore | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        is_url = isinstance(root, str) and "://" in root
        self.root: str | Path = str(root) if is_url else Path(root)
        self.files: Files = (
            RemoteFiles(str(root), store, sleep) if is_url else LocalFiles(Path(root), disk)
        )

    @property
    def key(self) -> str:
        """The same for equal folders, of one process."""
        return self.root if isinstance(self.root, str) else os.path.realpath(self.root)

    def numbers(self) -> list[int]:
        """The numbers of the backups that claim to be complete, ascending."""
        return self.files.numbers()

    def path(self, number: int, kind: str = "backup") -> Path | str:
        """Where a backup lies: a `Path`, or the text of a URL."""
        return self.files.path(number, kind)

    # ---- writing ---------------------------------------------------------------------------------

    def begin(self, token: str = "", fence: int = 0, above: int = 0) -> Draft:
        """Starts a new backup and removes what killed processes left.

        Args:
            token, fence: of the lease that the writer has; without one nobody else may write.
            above: its number is higher.
        """
        return self.files.begin(token, fence, above)

    def write(
        self, draft: Draft, files: Mapping[str, Iterable[bytes | memoryview]]
    ) -> dict[str, FileRecord]:
        """Writes and syncs files of a backup that was begun, in this process or another."""
        return {name: self._write_file(draft, name, content) for name, content in files.items()}

    def _write_file(
        self, draft: Draft, name: str, content: Iterable[bytes | memoryview]
    ) -> FileRecord:
        digest, size_bytes = hashlib.sha256(), 0

        def hashed() -> Iterator[bytes | memoryview]:
            nonlocal size_bytes
            for chunk in content:
                digest.update(chunk)
                size_bytes += len(chunk)
                yield chunk

        self.files.write(draft, name, hashed())
        return FileRecord(size_bytes=size_bytes, sha256=digest.hexdigest())

    def commit(
        self,
        draft: Draft,
        files: Mapping[str, FileRecord],
        about: Mapping,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes a backup complete: its manifest is written and the backup published.

        Args:
            draft: what `begin` returned.
            files: what `write` returned, of all workers.
            about: for the manifest.
            check: called between the two; what it raises leaves the backup unpublished.
        """
        is_sharded = any(name.startswith("shards-") for name in files)
        content = {
            "format": SHARDED_FORMAT if is_sharded else FORMAT,
            "about": about,
            "files": {name: record.model_dump() for name, record in files.items()},
        }
        content["sha256"] = _hash_of(content)
        self.files.write(draft, MANIFEST, [json.dumps(content, indent=1).encode()])
        check()
        self.files.publish(draft)

    def abandon(self, draft: Draft) -> None:
        """Removes a backup that was begun and will not be committed."""
        self.files.abandon(draft)

    # ---- reading ---------------------------------------------------------------------------------

    def manifest(self, number: int) -> Manifest:
        """The manifest of a backup.

        Raises:
            InvalidBackupError: if it is damaged, or of a format this library does not read.
        """
        where = f"{self.path(number)}/{MANIFEST}"
        try:
            content = parse_json(self._read_file(number, MANIFEST, LARGEST_MANIFEST_BYTES))
            found = content.pop("sha256")
            if found != _hash_of(content):
                raise ValueError("its SHA-256 differs")
            if content["format"] not in (FORMAT, SHARDED_FORMAT):
                raise InvalidBackupError(
                    f"{self.path(number)} must have format {FORMAT} or {SHARDED_FORMAT}. Received: "
                    f"format {content['format']}, of tfparallel "
                    f"{content['about'].get('tfparallel')}. "
                    "Restore it with that version."
                )
            checked = ManifestContent.model_validate(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidBackupError(f"{where} is damaged: {error!r}.") from error
        return Manifest(content["about"], checked.files, found)

    def is_whole(self, number: int) -> bool:
        """Whether a backup has its manifest and files of the right sizes; these are not read."""
        try:
            records = self.manifest(number).files
            sizes = {name: self.files.size(number, name) for name in records}
        except (InvalidBackupError, OSError):
            return False
        return all(sizes[name] == record.size_bytes for name, record in records.items())

    def read(self, number: int, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """The files `names` of a backup (None: all), each with the size and hash it should have.

        Raises:
            InvalidBackupError: naming the first file that is missing or differs.
        """
        records = self.manifest(number).files
        contents = {}
        for name in records if names is None else names:
            path = f"{self.path(number)}/{name}"
            if name not in records or not FILE.fullmatch(name):
                raise InvalidBackupError(f"{path} is not a file of this backup.")
            contents[name] = self._read_file(number, name, records[name].size_bytes)
            received = _record_of(contents[name])
            if received != records[name]:
                raise InvalidBackupError(
                    f"{path} must have {records[name].size_bytes} bytes with SHA-256 "
                    f"{records[name].sha256}. Received: {received.size_bytes} bytes, "
                    f"{received.sha256}."
                )
        return contents

    def _read_file(self, number: int, name: str, largest_bytes: int) -> bytes:
        try:
            return self.files.read(number, name, largest_bytes)
        except OSError as error:
            path = f"{self.path(number)}/{name}"
            raise InvalidBackupError(f"{path} cannot be read: {error}.") from error

    # ---- deleting --------------------------------------------------------------------------------

    def delete(self, number: int) -> None:
        """Deletes a backup; files in it that are not ours stay where they do not count."""
        self.files.delete(number)

    def delete_all(self, check: Callable[[], None] = lambda: None) -> None:
        """Deletes every backup, the newest last, and the folder if nothing else is in it.

        Args:
            check: called before each; what it raises leaves the rest.
        """
        for number in self.numbers():
            check()
            self.delete(number)
        self.delete_root()

    def delete_root(self) -> None:
        """Removes the folder if nothing is in it."""
        self.files.delete_root()


def _record_of(data: bytes) -> FileRecord:
    return FileRecord(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _hash_of(content: Mapping) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
