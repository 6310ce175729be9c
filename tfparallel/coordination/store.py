"""A key-value store that all workers of a job share, to agree on what they are about to do."""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tfparallel.coordination.probe import is_closed
from tfparallel.coordination.watch import Watch
from tfparallel.internals import context


class RankHasEnded(ConnectionError):
    """A rank's process is not there any more."""


class Store(Protocol):
    """What workers write for one another. A key is a path, written once, and may be deleted."""

    def put(self, key: str, value: str) -> bool:
        """Writes `value`; returns False, and changes nothing, where the key exists."""

    def get(self, key: str, timeout_s: float) -> str:
        """The value of `key`, waiting until it is written.

        Raises:
            TimeoutError: if nobody has written it for `timeout_s`.
            ConnectionError: if the job has ended.
        """

    def delete(self, key: str) -> None:
        """Forgets `key`, and all keys below it."""

    def describe(self, rank: int) -> str:
        """Where worker `rank` runs, for messages."""

    def require_alive(self, rank: int) -> None:
        """Raises ConnectionError, with what is known, if worker `rank` has died."""


class CoordinationStore:
    """The coordination service of a TensorFlow cluster.

    Args:
        addresses: `"host:port"` of every worker by rank.
        tasks: `(job, index)` of every worker by rank.
        watch: asks the others whether they are there.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tasks: Sequence[tuple[str, int]],
        watch: Watch | None = None,
    ):
        self._addresses, self._tasks, self._watch = addresses, tasks, watch

    def put(self, key: str, value: str) -> bool:
        """See `Store`."""
        with tf.init_scope():
            try:
                context.context().set_config_key_value(key, value)
            except tf.errors.AlreadyExistsError:
                return False
        return True

    def get(self, key: str, timeout_s: float) -> str:
        """See `Store`."""
        with tf.init_scope():
            try:
                return context.context().get_config_key_value(key, int(timeout_s * 1000))
            except tf.errors.DeadlineExceededError:
                raise TimeoutError(key) from None
            except tf.errors.OpError as error:
                raise ConnectionError(error.message) from error

    def delete(self, key: str) -> None:
        """See `Store`."""
        with tf.init_scope():
            context.context().delete_config_key_value(key)

    def describe(self, rank: int) -> str:
        """See `Store`."""
        job, index = self._tasks[rank]
        return f"/job:{job}/task:{index} at {self._addresses[rank]}"

    def require_alive(self, rank: int) -> None:
        """See `Store`."""
        if is_closed(self._addresses[rank]):
            raise RankHasEnded("It has ended, its own log says why: nothing listens there.")
        if self._watch is not None and any(
            each.startswith(f"rank {rank} ") for each in self._watch.lost()
        ):
            raise ConnectionError(
                f"It is stopped, or cut off: it has been silent for {self._watch.patience_s:g} s."
            )
