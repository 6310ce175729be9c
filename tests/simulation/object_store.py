"""An object store of the simulated world: no folders, no renames, requests that come late or fail.

A request on one object is one step, and a listing is of one moment, as in S3 and Google's store. A
request that was sent is done even if who sent it dies, or is told that it has failed; some are done
much later. Making an object only where there is none is atomic.
"""

import contextlib
import errno
import io
from collections.abc import Callable, Iterator

from tests.simulation.world import Process, Violation, World

_LATE_S = (0.05, 0.5, 3.0, 12.0)


class SimulatedStore:
    """The objects by path.

    Args:
        world: where it is.
        error_chance: that a request fails, or that it is done and its answer lost.
        late_chance: that a request that changes something is done late.
        silence_chance: that one that changes nothing has no answer.
        is_strict: whether removing what is not there fails, as in Google's store and in memory.
    """

    def __init__(
        self,
        world: World,
        error_chance: float = 0.0,
        late_chance: float = 0.0,
        silence_chance: float = 0.0,
        *,
        is_strict: bool,
    ):
        self.world, self.is_strict, self.silence_chance = world, is_strict, silence_chance
        self.error_chance, self.late_chance = error_chance, late_chance
        self.objects: dict[str, bytes] = {}
        self.changed: Callable[[str], None] = lambda path: None

    def change(self, path: str, action: Callable[[], None]) -> None:
        """Does what was asked for of an object, and lets the observer look."""
        action()
        self.changed(path)


class StoreClient:
    """The store as a process sees it; see `remote_files.ObjectStore`.

    Args:
        store: it.
        process: who asks; None looks, and no time passes.
    """

    protocol = ("s3",)

    def __init__(self, store: SimulatedStore, process: Process | None):
        self._store, self._process, self._world = store, process, store.world

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        del path, exist_ok  # there are none

    def rmdir(self, path: str) -> None:
        raise NotImplementedError(path)

    def invalidate_cache(self) -> None:
        pass

    def ls(self, path: str, detail: bool = True) -> list[str]:
        del detail
        self._ask()
        below = path.rstrip("/") + "/"
        rest = [key.removeprefix(below) for key in self._store.objects if key.startswith(below)]
        if not rest:
            raise FileNotFoundError(path)
        return sorted({below + each.split("/")[0] for each in rest})

    def cat_file(self, path: str) -> bytes:
        self._ask()
        return self._found(path)

    def size(self, path: str) -> int:
        self._ask()
        return len(self._found(path))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        def put() -> None:
            if mode == "create" and path in self._store.objects:
                raise FileExistsError(path)
            self._store.objects[path] = bytes(value)

        self._send(path, put, "put")

    def rm_file(self, path: str) -> None:
        def remove() -> None:
            if self._store.is_strict:
                self._found(path)
            self._store.objects.pop(path, None)

        self._send(path, remove, "remove")

    @contextlib.contextmanager
    def open(self, path: str, mode: str = "rb") -> Iterator[io.BytesIO]:
        """All is sent at the end, as one object; also what an error has cut off, as fsspec does."""
        assert mode == "wb", mode
        file = io.BytesIO()
        try:
            yield file
        except Exception:
            self.pipe_file(path, file.getvalue())
            raise
        self.pipe_file(path, file.getvalue())

    # ---- requests --------------------------------------------------------------------------------

    def _found(self, path: str) -> bytes:
        if path not in self._store.objects:
            raise FileNotFoundError(path)
        return self._store.objects[path]

    def _ask(self) -> None:
        if self._process is not None:
            self._world.request()
            self._fails(self._store.silence_chance)

    def _fails(self, chance: float) -> None:
        if chance and self._world.choices.rarely(chance):
            self._world.note("store: an error")
            raise OSError(errno.EIO, "the store does not answer")

    def _send(self, path: str, action: Callable[[], None], text: str) -> None:
        if self._process is None:
            raise Violation("who looks changes nothing")
        self._world.request()
        if self._world.is_told:
            self._world.note(f"store: {text} {path}")
        self._fails(self._store.error_chance)
        chance = self._store.late_chance
        if chance and self._world.choices.rarely(chance):
            self._send_late(path, action, text)
        else:
            self._store.change(path, action)
        self._fails(self._store.error_chance)  # it is done, and its answer lost

    def _send_late(self, path: str, action: Callable[[], None], text: str) -> None:
        """It is on its way, whatever becomes of who has sent it."""
        errors: list[OSError] = []
        delay_s = _LATE_S[self._world.choices.below(len(_LATE_S))]

        def arrive(process: Process) -> None:
            self._world.sleep(delay_s)
            self._world.note(f"late by {delay_s} s: {text} {path}")
            try:
                self._store.change(path, action)
            except OSError as error:
                errors.append(error)

        on_its_way = self._world.process("a request", arrive)
        self._world.wait(lambda: on_its_way.is_over)
        if errors:
            raise errors[0]
