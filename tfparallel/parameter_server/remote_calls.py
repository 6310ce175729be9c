"""Eager operations on other tasks, whose errors and delays stay where they belong.

Threads share an executor until they have one of their own. TensorFlow releases tensors on tasks
there, whichever thread drops them, and waits for all that is pending there before it reads the next
batch of a dataset: for ever, if a task has stopped. What a call raises late, too, fails all that
its executor does next.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from tfparallel.internals import context, new_executor

_of_thread = threading.local()


class CallsOfThread(Protocol):
    """What the calls of one thread run in, one after another."""

    def wait(self) -> None:
        """Returns when they are done; raises the error of one."""

    def clear_error(self) -> None:
        """Runs calls again after an error."""


def own_executor() -> CallsOfThread:
    """The calling thread's own executor; from the first call on the thread uses it."""
    if not hasattr(_of_thread, "executor"):
        _of_thread.executor = new_executor(enable_async=False)
        context.context().executor = _of_thread.executor
    return _of_thread.executor


@contextlib.contextmanager
def remote_calls() -> Iterator[None]:
    """When it ends, the operations within it are done.

    They return before they are done, and what fails later fails the executor: were it the thread's
    own, all that the thread does next would raise the error of a task that was lost.
    """
    own_executor()  # the scope waits for what it leaves
    executor = new_executor(enable_async=False)
    try:
        with context.executor_scope(executor):
            yield
            executor.wait()
    finally:
        executor.clear_error()
