"""A disk of the simulated world: what was not synced may be lost, torn or in another order.

It has what processes see, and of each name and file what is on the disk for certain. After a power
failure each change that was not synced is there or not, by chance and by itself: a rename may be
there and a file in the folder be cut off.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.simulation.world import Process, World


class _File:
    """Bytes; `synced` are those that are on the disk."""

    def __init__(self) -> None:
        self.data = b""
        self.synced: bytes | None = None


class _Folder:
    """Names; `synced` are those that are on the disk."""

    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}


class SimulatedDisk:
    """The one disk that all processes share.

    Args:
        world: where it is.
        error_chance: that a call which changes something fails with EIO, or a full disk.
    """

    def __init__(self, world: World, error_chance: float = 0.0):
        self.world, self.error_chance = world, error_chance
        self.root = _Folder()
        self._names = 0

    def of(self, process: Process) -> "MountedDisk":
        """The disk as a process sees it."""
        return MountedDisk(self, process)

    def power_fails(self) -> None:
        """Keeps what is certain, and of the rest what chance keeps."""
        self._lose(self.root)

    def _lose(self, folder: _Folder) -> None:
        below = self.world.choices.below
        kept: dict[str, _File | _Folder] = {}
        for name in sorted({*folder.entries, *folder.synced}):
            now, before = folder.entries.get(name), folder.synced.get(name)
            each = now if now is before or not below(2) else before
            if isinstance(each, _File):
                kept[name] = each
        names_now = {each: name for name, each in folder.entries.items()}
        names_before = {each: name for name, each in folder.synced.items()}
        for each in {**names_before, **names_now}:
            if isinstance(each, _Folder):  # a rename is there or not, as one
                names = [names_now.get(each), names_before.get(each)]
                name = names[0] if names[0] == names[1] else names[below(2)]
                if name is not None:
                    kept[name] = each
        folder.entries, folder.synced = kept, dict(kept)
        for each in kept.values():
            if isinstance(each, _Folder):
                self._lose(each)
            elif each.data != each.synced:
                each.data = each.synced = _torn(each, below)

    def drawn_name(self) -> str:
        self._names += 1
        return f"{self._names:016x}"


def _torn(file: _File, below: "object") -> bytes:
    """Of what was written, and what was there: one, the other, or the beginning of the new."""
    choice = below(3)  # type: ignore[operator]
    if choice == 0:
        return file.data
    if choice == 1:
        return file.synced or b""
    length = below(len(file.data) + 1)  # type: ignore[operator]
    return file.data[:length] + (file.synced or b"")[length:]


class MountedDisk:
    """See `tfparallel.callbacks.backup.disk.Disk` for the methods."""

    def __init__(self, disk: SimulatedDisk, process: Process):
        self._disk, self._process, self._world = disk, process, disk.world

    def names(self, folder: Path) -> list[str]:
        self._asks()
        return list(self._folder(folder).entries)

    def is_folder(self, path: Path) -> bool:
        self._asks()
        return isinstance(self._find(path), _Folder)

    def is_link(self, path: Path) -> bool:
        del path
        return False

    def exists(self, path: Path) -> bool:
        self._asks()
        return self._find(path) is not None

    def make_folder(self, path: Path) -> None:
        self._changes(path)
        parent = self._folder(path.parent)
        if path.name in parent.entries:
            raise _error(errno.EEXIST, path)
        parent.entries[path.name] = _Folder()

    def make_folders(self, path: Path) -> None:
        self._changes(path)
        folder = self._disk.root
        for name in _parts(path):
            folder = folder.entries.setdefault(name, _Folder())  # type: ignore[assignment]

    def write_new(self, path: Path, content: Iterable[bytes | memoryview]) -> None:
        self._changes(path)
        parent = self._folder(path.parent)
        if path.name in parent.entries:
            raise _error(errno.EEXIST, path)
        file = parent.entries[path.name] = _File()
        for chunk in content:
            self._changes(path)
            file.data += bytes(chunk)
        self._changes(path)
        file.synced = file.data

    def rewrite(self, path: Path, data: bytes, is_ours: Callable[[bytes], bool]) -> None:
        self._changes(path)
        file = self._file(path)
        if not is_ours(file.data):
            raise _error(errno.ENOENT, path)
        file.data = data[: len(data) // 2] + file.data[len(data) // 2 :]
        self._asks()
        file.data = data
        self._changes(path)
        file.synced = data

    def read(self, path: Path, largest_bytes: int) -> bytes:
        self._asks()
        data = self._file(path).data
        if len(data) > largest_bytes:
            raise _error(errno.EFBIG, path)
        return data

    def size(self, path: Path) -> int:
        self._asks()
        return len(self._file(path).data)

    def rename(self, path: Path, target: Path) -> None:
        self._changes(path)
        parent, new_parent = self._folder(path.parent), self._folder(target.parent)
        moved, there = parent.entries.get(path.name), new_parent.entries.get(target.name)
        if moved is None:
            raise _error(errno.ENOENT, path)
        if isinstance(there, _Folder) and there.entries:
            raise _error(errno.ENOTEMPTY, target)
        del parent.entries[path.name]
        new_parent.entries[target.name] = moved

    def link(self, path: Path, target: Path) -> None:
        self._changes(path)
        file, parent = self._file(path), self._folder(target.parent)
        if target.name in parent.entries:
            raise _error(errno.EEXIST, target)
        parent.entries[target.name] = file

    def remove_file(self, path: Path) -> None:
        self._changes(path)
        parent = self._find(path.parent)
        if isinstance(parent, _Folder):
            parent.entries.pop(path.name, None)

    def remove_folder(self, path: Path) -> None:
        self._changes(path)
        folder = self._folder(path)
        if folder.entries:
            raise _error(errno.ENOTEMPTY, path)
        del self._folder(path.parent).entries[path.name]

    def sync_folder(self, folder: Path) -> None:
        self._changes(folder)
        found = self._folder(folder)
        found.synced = dict(found.entries)

    def drawn_name(self) -> str:
        return self._disk.drawn_name()

    # ---- finding ---------------------------------------------------------------------------------

    def _asks(self) -> None:
        self._world.request()

    def _changes(self, path: Path) -> None:
        self._world.request()
        if self._world.is_told:
            self._world.note(f"disk: {sys._getframe(1).f_code.co_name} {path}")
        chance = self._disk.error_chance
        if chance and self._world.choices.rarely(chance):
            number = (errno.ENOSPC, errno.EIO)[self._world.choices.below(2)]
            self._world.note(f"disk: {os.strerror(number)} at {path.name}")
            raise _error(number, path)

    def _find(self, path: Path) -> "_File | _Folder | None":
        found: _File | _Folder | None = self._disk.root
        for name in _parts(path):
            found = found.entries.get(name) if isinstance(found, _Folder) else None
        return found

    def _folder(self, path: Path) -> _Folder:
        found = self._find(path)
        if not isinstance(found, _Folder):
            raise _error(errno.ENOENT, path)
        return found

    def _file(self, path: Path) -> _File:
        found = self._find(path)
        if not isinstance(found, _File):
            raise _error(errno.ENOENT, path)
        return found


def _parts(path: Path) -> tuple[str, ...]:
    return path.parts[1:]


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
