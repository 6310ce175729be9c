"""The files of backups in a store that fsspec reaches: `gs://`, `s3://`, `memory://` and others.

Such stores cannot rename a folder at once. There a mark, an object beside the folder, says that a
backup does not count; making and deleting one object is atomic.

```
gs://bucket/run/
  backup-00000007-TOKEN/shared.json ...
  backup-00000008-TOKEN/shared.json ...  does not count: begun, or half deleted
  writing-00000008-TOKEN-2               its mark; `publish` deletes it, as the last thing
  lease-00000002                         whose the folder is, and which older backups count
```

A backup that is deleted gets its mark, `deleting-N-TOKEN`, first. TOKEN and 2 are those of the
lease it was made under; earlier versions wrote none. An object can appear that was sent long ago:
the claim says whose backups count (`lease.counting`). So the last claim stays, also when all
backups are deleted; and a draft that another owner has removed keeps its mark until the claim says
that it does not count.

A request that changes nothing is made again where no answer comes: else a backup that could not be
read once would be taken for a damaged one, and an older one restored.
"""

import contextlib
import errno
import importlib
import posixpath
import secrets
import time
from collections.abc import Callable, Iterable
from typing import IO, Any, Protocol

import tenacity

from tfparallel.callbacks.backup.backup_names import (
    FILE,
    KINDS,
    Draft,
    drafts,
    folder_name,
    numbered,
    swept,
    unfinished_claim,
)
from tfparallel.callbacks.backup.disk import too_large
from tfparallel.callbacks.backup.lease import Claim, counting, may_be_counted

_ATTEMPTS = 5  # within 1.5 s, beside those that a plug-in of fsspec's makes by itself
_FIRST_PAUSE_S = 0.1
# What a store answers, or what was asked of it in a wrong way; all else may be the network's fault.
_ANSWERS = (
    FileExistsError,
    FileNotFoundError,
    NotImplementedError,
    PermissionError,
    TypeError,
    ValueError,
)


class ObjectStore(Protocol):
    """What is asked of a store: some methods of `fsspec.AbstractFileSystem`.

    Each request on one object is one step for other processes, and what `ls` gives was so at one
    moment. What a request has asked for may be done later, though it failed or its sender died.
    """

    protocol: str | tuple[str, ...]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes folders where the store has any."""

    def rmdir(self, path: str) -> None:
        """Removes an empty folder where the store has any."""

    def ls(self, path: str, detail: bool = True) -> list[str]:
        """The paths of what lies in a folder; FileNotFoundError where it is missing."""

    def invalidate_cache(self) -> None:
        """What was listed before is asked for again."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        """Makes an object; with mode "create", FileExistsError where there is one."""

    def rm_file(self, path: str) -> None:
        """Removes an object; some raise FileNotFoundError where it is missing."""

    def cat_file(self, path: str) -> bytes:
        """The bytes of an object."""

    def size(self, path: str) -> int | None:
        """How many there are."""

    def open(self, path: str, mode: str = "rb") -> IO[bytes]:
        """A file that becomes an object when it is closed."""


class RemoteFiles:
    """See `storage.Files` for the methods.

    Args:
        url: the folder, as fsspec understands it.
        store: where it is; by default what fsspec finds.
        sleep: pauses between requests that are made again, s.

    Raises:
        ImportError: if fsspec, or its plug-in for this kind of URL, is not installed.
    """

    def __init__(
        self,
        url: str,
        store: ObjectStore | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._url = url
        self._ask = tenacity.Retrying(
            retry=tenacity.retry_if_not_exception_type(_ANSWERS),
            stop=tenacity.stop_after_attempt(_ATTEMPTS),
            wait=tenacity.wait_exponential(_FIRST_PAUSE_S),
            sleep=sleep,
            reraise=True,
        )
        self._store, self._root = _found(url) if store is None else (store, url)
        self._known: dict[int, Draft] = {}

    def numbers(self) -> list[int]:
        return [draft.number for draft in self._counting(self._names())]

    def path(self, number: int, kind: str = "backup") -> str:
        return f"{self._url.rstrip('/')}/{self._draft(number).name(kind)}"

    def sweep(self, token: str = "", fence: int = 0) -> int:
        names = self._names()
        published = self._published(names)
        for draft in swept(names, token, fence):
            self._mark(draft, "deleting")  # its owner may take the other mark away at any time
            self._remove(draft, "writing")
        claims = self._read_claims(names)
        for draft in drafts(self._names(), "deleting"):
            may_count = draft.token != token and may_be_counted(draft.token, claims)
            self._remove(draft, "deleting", keeps_mark=may_count)
        counting_ones = self._counting(names)
        for draft in published:
            if draft not in counting_ones:
                self._delete(draft)
        return max((n.number for k in KINDS for n in drafts(names, k)), default=0)

    def begin(self, token: str, fence: int, above: int) -> Draft:
        self._store.makedirs(self._root, exist_ok=True)
        highest = self.sweep(token, fence)
        if not token:  # what was begun and never counted is counted again
            names = self._names()
            highest = max((n.number for k in KINDS for n in drafts(names, k)), default=0)
        draft = Draft(max(highest, above) + 1, token, fence)
        self._mark(draft, "writing")
        self._store.makedirs(self._object(draft), exist_ok=True)
        return draft

    def probe(self) -> None:
        self._store.makedirs(self._root, exist_ok=True)
        path = f"{self._root}/{unfinished_claim(0, secrets.token_hex(8))}"
        self._store.pipe_file(path, b"probe")
        self._store.rm_file(path)

    def write(self, draft: Draft, name: str, content: Iterable[bytes | memoryview]) -> None:
        with self._store.open(f"{self._object(draft)}/{name}", "wb") as file:
            for chunk in content:
                file.write(chunk)

    def publish(self, draft: Draft) -> None:
        self._store.rm_file(self._object(draft, "writing"))

    def abandon(self, draft: Draft) -> None:
        self._remove(draft, "writing")

    def size(self, number: int, name: str) -> int:
        self._store.invalidate_cache()
        return self._size(f"{self._object(self._draft(number))}/{name}")

    def read(self, number: int, name: str, largest_bytes: int) -> bytes:
        path = f"{self._object(self._draft(number))}/{name}"
        if (size_bytes := self._size(path)) > largest_bytes:
            raise too_large(path, size_bytes, largest_bytes)
        return self._ask(self._store.cat_file, path)

    def delete(self, number: int) -> None:
        self._delete(self._draft(number))

    def claims(self) -> list[int]:
        return numbered(self._names(), "lease")

    def read_claim(self, fence: int) -> bytes:
        try:
            return self._ask(self._store.cat_file, self._claim(fence))
        except FileNotFoundError:
            return b""

    def create_claim(self, fence: int, data: bytes) -> bool:
        """Stores that cannot refuse to replace an object are asked whose it is afterwards."""
        self._store.makedirs(self._root, exist_ok=True)
        if fence in self.claims():
            return False
        try:
            if "file" in _protocols(self._store):  # its `pipe_file` looks first, and writes then
                with self._store.open(self._claim(fence), "xb") as file:
                    file.write(data)
            else:
                self._store.pipe_file(self._claim(fence), data, mode="create")
        except FileExistsError:
            return False
        return self.read_claim(fence) == data

    def rewrite_claim(self, fence: int, data: bytes) -> None:
        if "file" in _protocols(self._store):  # `pipe_file` empties it first, or brings it back
            with self._store.open(self._claim(fence), "r+b") as file:
                file.write(data)
        else:
            self._store.pipe_file(self._claim(fence), data)

    def delete_claim(self, fence: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.rm_file(self._claim(fence))

    def accepted(self) -> list[Draft]:
        return self._counting(self._names())

    def delete_root(self) -> None:
        if not self._names():
            self._remove_folder(self._root)

    def _size(self, path: str) -> int:
        size_bytes = self._ask(self._store.size, path)
        if size_bytes is None:
            raise OSError(errno.EINVAL, "a store that does not know its size", path)
        return size_bytes

    def _object(self, draft: Draft, kind: str = "backup") -> str:
        return f"{self._root.rstrip('/')}/{draft.name(kind)}"

    def _claim(self, fence: int) -> str:
        return f"{self._root.rstrip('/')}/{folder_name('lease', fence)}"

    def _mark(self, draft: Draft, kind: str) -> None:
        self._store.pipe_file(self._object(draft, kind), b"")

    def _draft(self, number: int) -> Draft:
        """The backup with a number, whoever has made it."""
        if number not in self._known:
            self.numbers()
        return self._known.get(number, Draft(number))

    def _published(self, names: list[str]) -> list[Draft]:
        marked = {d.published for kind in ("writing", "deleting") for d in drafts(names, kind)}
        return [draft for draft in drafts(names, "backup") if draft.published not in marked]

    def _counting(self, names: list[str]) -> list[Draft]:
        published = [draft.published for draft in self._published(names)]
        found = [Draft(*each) for each in counting(published, self._read_claims(names))]
        self._known = {draft.number: draft for draft in found}
        return found

    def _read_claims(self, names: list[str]) -> list[Claim | None]:
        """From the newest on."""
        fences = reversed(numbered(names, "lease"))
        return [Claim.from_bytes(fence, self.read_claim(fence)) for fence in fences]

    def _names(self, folder: str = "") -> list[str]:
        """What lies in a folder of the root, fresh from the store; nothing where it is missing."""
        self._store.invalidate_cache()
        try:
            paths = self._ask(self._store.ls, folder or self._root, detail=False)
        except FileNotFoundError:
            return []
        return [posixpath.basename(path.rstrip("/")) for path in paths]

    def _delete(self, draft: Draft) -> None:
        self._mark(draft, "deleting")
        self._remove(draft, "deleting")

    def _remove(self, draft: Draft, kind: str, keeps_mark: bool = False) -> None:
        """Removes our files of a backup that has a mark, and then the mark."""
        folder = self._object(draft)
        names = self._names(folder)
        for name in filter(FILE.fullmatch, names):
            self._remove_object(f"{folder}/{name}")
        if all(map(FILE.fullmatch, names)):
            self._remove_folder(folder)
            if not keeps_mark:
                self._remove_object(self._object(draft, kind))

    def _remove_object(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another job may have swept it away
            self._store.rm_file(path)

    def _remove_folder(self, folder: str) -> None:
        # Object stores have no folders: there it went with its last object.
        with contextlib.suppress(OSError, NotImplementedError):
            self._store.rmdir(folder)


def _found(url: str) -> tuple[ObjectStore, str]:
    """The store of a URL, and the path in it."""
    try:
        fsspec: Any = importlib.import_module("fsspec")
    except ImportError as error:
        raise ImportError(
            f"A backup_dir that is a URL needs fsspec. Received: {url!r}. Run `pip install "
            "fsspec` and, for gs:// or s3://, gcsfs or s3fs; or use a local folder."
        ) from error
    store, root = fsspec.url_to_fs(url)
    return store, root


def _protocols(store: ObjectStore) -> tuple[str, ...]:
    return (store.protocol,) if isinstance(store.protocol, str) else tuple(store.protocol)
