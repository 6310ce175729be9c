"""Writes backups beside training: on a thread of its own, one at a time."""

import os
import sys
import threading
from collections.abc import Callable

from tfparallel.coordination.machine import THIS_MACHINE, Machine, Running


def writer_for(folder: str | os.PathLike) -> "Writer":
    """The writer of this process for a folder: also for a `fit` that takes over from a failed one.

    Args:
        folder: where backups go.
    """
    return _writers.setdefault(os.path.realpath(folder), Writer())


def end_all(expected: type[Exception]) -> list[Exception]:
    """Waits for all writers of this process, whose trainings have ended.

    Args:
        expected: errors to return instead of raising.
    """
    errors: list[Exception] = []
    for writer in _writers.values():
        try:
            writer.wait()
        except expected as error:
            errors.append(error)
    return errors


class Writer:
    """Runs jobs on another thread, in order, at most one at a time.

    A thread lives as long as its job and is no daemon, so that a program that ends, or fails,
    finishes the backup it has begun.

    Args:
        machine: what it runs on.
    """

    def __init__(self, machine: Machine = THIS_MACHINE) -> None:
        self._machine = machine
        self._thread: Running | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Starts `job`, once the one before it has ended.

        Raises:
            Exception: what the job before it raised. `job` is started all the same: other workers
                may count on it.
        """
        if self._thread is not None:
            self._thread.join()
        failure, self._error = self._error, None

        def run() -> None:
            _yield_processors()
            try:
                job()
            except BaseException as error:
                self._error = error

        self._thread = self._machine.start(run, "tfparallel-backup", is_daemon=False)
        if failure is not None:
            raise failure

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Returns when no job is running.

        Raises:
            Exception: what the job raised.
        """
        if self._thread is not None:
            self._thread.join()
        self.raise_error()

    def raise_error(self) -> None:
        """Raises what a job that has ended raised, once; does not wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _yield_processors() -> None:
    """Lets the calling thread use what training leaves of the processors: hashing takes some."""
    if sys.platform == "linux":  # elsewhere the priority is of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


_writers: dict[str, Writer] = {}
