"""Eager operations on other tasks, whose errors stay where they belong."""

import contextlib
from collections.abc import Iterator

from tfparallel.tf_internals import context, new_executor


@contextlib.contextmanager
def remote_calls() -> Iterator[None]:
    """When it ends, the operations within it are done.

    They return before they are done, and what fails later fails the executor: were it the thread's
    own, all that the thread does next would raise the error of a task that was lost.
    """
    executor = new_executor(enable_async=False)
    try:
        with context.executor_scope(executor):
            yield
            executor.wait()
    finally:
        executor.clear_error()
