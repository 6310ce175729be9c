"""Which task an error speaks of, and how a worker that came back is let in again."""

import contextlib
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.parameter_server.cluster import ParameterServerCluster, Timeouts
from tfparallel.servers.probe import is_listening
from tfparallel.tf_internals import context

# What a call to a task says when the task is gone, or has been started anew since.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.CancelledError,
)
_STARTED_ANEW = ("context_id", "context id", "incarnation", "remote_handle", "unknown device")
_POLL_S = 0.5


class TaskLost(Exception):
    """A worker is gone or was started anew; `reason` says what TensorFlow said."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class ServerLost(RuntimeError):
    """A parameter server is gone, with the variables that it held."""


class Recovery:
    """Tells lost workers, lost servers and mistakes of the user apart.

    Args:
        cluster: connected.
        timeouts: how long to wait for a server's port before the server counts as lost.

    Attributes:
        generations: how often each worker has been lost.
    """

    def __init__(self, cluster: ParameterServerCluster, timeouts: Timeouts):
        self._cluster, self._timeouts = cluster, timeouts
        self._updating = threading.Lock()
        self.generations = [0] * cluster.num_workers

    @contextlib.contextmanager
    def of_worker(self, worker: int) -> Iterator[None]:
        """Within it, errors of lost tasks become `TaskLost` or `ServerLost`."""
        try:
            yield
        except tf.errors.OpError as error:
            if not _speaks_of_lost_task(error):
                raise
            self._raise_if_server_lost(error)
            raise TaskLost(_first_line(error)) from error

    @contextlib.contextmanager
    def of_servers(self) -> Iterator[None]:
        """Within it, errors of lost servers become `ServerLost`."""
        try:
            yield
        except tf.errors.OpError as error:
            if _speaks_of_lost_task(error):
                self._raise_if_server_lost(error)
            raise

    def _raise_if_server_lost(self, error: Exception) -> None:
        lost = [i for i in range(self._cluster.num_ps) if not self._is_there("ps", i)]
        restarted = (
            [] if lost else [i for i in range(self._cluster.num_ps) if self._is_named(i, error)]
        )
        if not lost and not restarted:
            return
        names = ", ".join(self._cluster.describe("ps", i) for i in lost or restarted)
        raise ServerLost(
            f"Expected every parameter server to live as long as the training. Received: {names} "
            f"{'is gone' if lost else 'has lost its state'}, with the variables it held. Start the "
            "job again; with the backup callback it resumes. (The chief is speaking.)"
        ) from error

    def _is_named(self, ps: int, error: Exception) -> bool:
        """Whether the error itself comes from a server that runs: it was started anew."""
        target = f"remote target /job:ps/replica:0/task:{ps}"
        return target in str(error)

    def _is_there(self, task_type: str, index: int) -> bool:
        return is_listening(self._cluster.tasks[task_type][index])

    def describe_servers(self) -> str:
        """All parameter servers and whether their ports are open, for messages."""
        return ", ".join(
            f"{self._cluster.describe('ps', i)}: "
            f"{'port open' if self._is_there('ps', i) else 'gone'}"
            for i in range(self._cluster.num_ps)
        )

    def await_worker(self, worker: int) -> None:
        """Waits until `worker` listens and makes its devices known again."""
        while True:
            while not self._is_there("worker", worker):
                time.sleep(_POLL_S)
            try:
                with self._updating:
                    self.generations[worker] += 1
                    context.context().update_server_def(context.get_server_def())
                return
            except tf.errors.OpError:
                time.sleep(_POLL_S)  # it, or another worker, has gone again meanwhile


def _speaks_of_lost_task(error: tf.errors.OpError) -> bool:
    return isinstance(error, _LOST) or any(sign in str(error) for sign in _STARTED_ANEW)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
