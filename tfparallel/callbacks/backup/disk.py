"""What is asked of a file system: the calls that the files of backups are made of.

Each is one step for other processes: it has happened or it has not. After a power failure a file
has its bytes only if it was synced, and its name only if its folder was.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """All methods raise `OSError`; who may read is nobody else's business: modes 0700 and 0600."""

    def names(self, folder: Path) -> list[str]:
        """What is in a folder."""

    def is_folder(self, path: Path) -> bool:
        """Whether there is a folder, or a link to one."""

    def is_link(self, path: Path) -> bool:
        """Whether there is a symbolic link."""

    def exists(self, path: Path) -> bool:
        """Whether there is anything."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder that must not exist, in one that does."""

    def make_folders(self, path: Path) -> None:
        """Makes a folder and those above it, where they are missing."""

    def write_new(self, path: Path, content: Iterable[bytes | memoryview]) -> None:
        """Makes a file that must not exist, and syncs it."""

    def rewrite(self, path: Path, data: bytes, is_ours: Callable[[bytes], bool]) -> None:
        """Changes the bytes of a file that must exist, in place, and syncs it.

        Args:
            path: of the file.
            data: its bytes from now on.
            is_ours: of its bytes until now; else it is as if there were none.
        """

    def read(self, path: Path, largest_bytes: int) -> bytes:
        """The bytes of a regular file; an error, before any is read, if there are more."""

    def size(self, path: Path) -> int:
        """The bytes of a file."""

    def rename(self, path: Path, target: Path) -> None:
        """Gives a file or folder another name; a folder is not put on one that holds anything."""

    def link(self, path: Path, target: Path) -> None:
        """Gives a file a second name that must not be taken."""

    def remove_file(self, path: Path) -> None:
        """Removes a file, if it is there."""

    def remove_folder(self, path: Path) -> None:
        """Removes a folder, which must be empty."""

    def sync_folder(self, folder: Path) -> None:
        """The names in a folder are on the disk when this returns."""

    def drawn_name(self) -> str:
        """Sixteen hexadecimal digits that nobody else has."""


class SystemDisk:
    """The file systems of this machine; see `Disk` for the methods."""

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def is_folder(self, path: Path) -> bool:
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        return path.is_symlink()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def make_folders(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write_new(self, path: Path, content: Iterable[bytes | memoryview]) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for chunk in content:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, path: Path, data: bytes, is_ours: Callable[[bytes], bool]) -> None:
        flags = os.O_RDWR | os.O_NOFOLLOW
        with open(os.open(path, flags), "r+b", buffering=0) as file:
            if not is_ours(file.read()):
                raise FileNotFoundError(errno.ENOENT, "it is another's by now", str(path))
            file.seek(0)
            file.write(data)
            file.truncate(len(data))
            os.fsync(file.fileno())

    def read(self, path: Path, largest_bytes: int) -> bytes:
        """Nothing is read through a link, a pipe or a device."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                error.strerror = "a symbolic link is not followed"
            raise
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            if status.st_size > largest_bytes:
                raise too_large(path, status.st_size, largest_bytes)
            return file.read()

    def size(self, path: Path) -> int:
        return os.lstat(path).st_size

    def rename(self, path: Path, target: Path) -> None:
        os.rename(path, target)

    def link(self, path: Path, target: Path) -> None:
        os.link(path, target)

    def remove_file(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def drawn_name(self) -> str:
        return secrets.token_hex(8)


def too_large(path: object, size_bytes: int, largest_bytes: int) -> OSError:
    """The error of a file that is not read, since it cannot be the one that was written."""
    text = f"{size_bytes} bytes, of {largest_bytes} at the most"
    return OSError(errno.EFBIG, text, str(path))
