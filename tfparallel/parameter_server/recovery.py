"""Which task an error speaks of, and how a worker that came back is let in again."""

import contextlib
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.coordination.lost_tasks import speaks_of_lost_task, speaks_of_new_task
from tfparallel.coordination.patience import Silence, Wait
from tfparallel.coordination.probe import answering, is_answering, is_listening, task_names
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.coordination.waiting import look
from tfparallel.internals import context
from tfparallel.parameter_server.server_cluster import ParameterServerCluster

START_AGAIN = "Start the job again; with the backup callback it resumes. (The chief is speaking.)"
_POLL_S = 0.5
_ASK_EVERY_S = 1.0


class TaskLost(Exception):
    """A worker is gone or was started anew; `reason` says what TensorFlow said."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class ServerLost(RuntimeError):
    """A parameter server is gone, with the variables that it held."""


class WorkerLost(RuntimeError):
    """A worker is gone for good, with its part of every batch; only where workers share batches."""


class Recovery:
    """Tells lost workers, lost servers and mistakes of the user apart.

    Args:
        cluster: connected.
        timeouts: how long to wait for a server's port before the server counts as lost.

    Attributes:
        generations: how often each worker may have been lost.
    """

    def __init__(self, cluster: ParameterServerCluster, timeouts: Timeouts):
        self._cluster, self._timeouts = cluster, timeouts
        self._updating = threading.Lock()
        self._asked_s = time.monotonic()
        self._servers = task_names(cluster.tasks, "ps")
        self._silence = Silence(self._servers, self._asked_s)
        self.generations = [0] * cluster.num_workers

    @contextlib.contextmanager
    def of_worker(self, worker: int) -> Iterator[None]:
        """Within it, errors of lost tasks become `TaskLost` or `ServerLost`."""
        try:
            yield
        except tf.errors.OpError as error:
            if not speaks_of_lost_task(error):
                raise
            self._raise_if_server_lost(error)
            raise TaskLost(_first_line(error)) from error

    @contextlib.contextmanager
    def of_servers(self) -> Iterator[None]:
        """Within it, errors of lost servers become `ServerLost`."""
        try:
            yield
        except tf.errors.OpError as error:
            if speaks_of_lost_task(error):
                self._raise_if_server_lost(error)
            raise

    @contextlib.contextmanager
    def of_servers_alone(self) -> Iterator[None]:
        """Within it, errors of servers that were started anew become `ServerLost`."""
        try:
            yield
        except tf.errors.OpError as error:
            if speaks_of_new_task(error):
                self._raise_for_servers(self._started_anew(error), "has lost its state", error)
            raise

    @contextlib.contextmanager
    def of_all(self) -> Iterator[None]:
        """Within it, errors of lost tasks become `ServerLost` or `WorkerLost`."""
        try:
            yield
        except tf.errors.OpError as error:
            if not speaks_of_lost_task(error):
                raise
            lost = [i for i in range(self._cluster.num_workers) if self._is_lost(i, error)]
            what = ", ".join(self._cluster.describe("worker", i) for i in lost) + " is gone"
            if not lost:
                self._raise_if_server_gone(error)
                if not (silent := self._silent()):
                    self._raise_if_server_lost(error)
                    raise
                what = f"no answer from {silent}"
            raise (ServerLost if "ps" in what else WorkerLost)(
                "Expected all workers and parameter servers to live as long as the training, where "
                f"they share each batch. Received: {what}. {START_AGAIN}"
            ) from error

    def _is_lost(self, worker: int, error: Exception) -> bool:
        is_named = f"remote target /job:worker/replica:0/task:{worker}" in str(error)
        was_started_anew = isinstance(error, tf.errors.OpError) and speaks_of_new_task(error)
        return (is_named and was_started_anew) or not self._is_there("worker", worker)

    def _silent(self) -> str:
        """Tasks that are stopped; asked several times, as one that is busy may be late."""
        names = task_names(self._cluster.tasks, "ps", "worker")
        for _ in range(3):
            there = answering(names)
            names = {name: address for name, address in names.items() if name not in there}
        return ", ".join(f"{name} ({address})" for name, address in names.items())

    def _raise_if_server_lost(self, error: Exception) -> None:
        self._raise_if_server_gone(error)
        self._raise_for_servers(self._started_anew(error), "has lost its state", error)

    def _raise_if_server_gone(self, error: Exception) -> None:
        gone = [i for i in range(self._cluster.num_ps) if not self._is_there("ps", i)]
        self._raise_for_servers(gone, "is gone", error)

    def _raise_for_servers(self, servers: list[int], what: str, error: Exception) -> None:
        if servers:
            names = ", ".join(self._cluster.describe("ps", i) for i in servers)
            raise ServerLost(
                "Expected every parameter server to live as long as the training. Received: "
                f"{names} {what}, with the variables it held. {START_AGAIN}"
            ) from error

    def _started_anew(self, error: Exception) -> list[int]:
        """The servers that the error itself comes from: they run, and know nothing of us."""
        text = str(error)
        targets = [f"remote target /job:ps/replica:0/task:{i}" for i in range(self._cluster.num_ps)]
        return [i for i, target in enumerate(targets) if target in text]

    def _is_there(self, task_type: str, index: int) -> bool:
        return is_listening(self._cluster.tasks[task_type][index])

    def silent_servers(self, limit_s: float) -> str:
        """Names those that have not answered for `limit_s`; called again and again while we work.

        A server that is stopped fails no call: everybody would wait for it for ever.
        """
        now_s = time.monotonic()
        if now_s - self._asked_s < _ASK_EVERY_S:
            return ""
        self._asked_s = now_s
        self._silence.heard(now_s, answering(self._servers))
        silent = self._silence.longer_than(limit_s)
        return ", ".join(f"{name} ({self._servers[name]})" for name in silent)

    def await_all_workers(self, error: tf.errors.OpError) -> None:
        """Waits until all tasks answer, after `error`, and makes the workers' devices known again.

        Raises:
            tf.errors.OpError: `error` itself, where it does not speak of a lost task.
            ServerLost: a parameter server is gone, or silent for `Timeouts.ps_s`.
            WorkerLost: a worker is gone for `Timeouts.all_workers_s`.
        """
        if not speaks_of_lost_task(error):
            raise error
        tasks = task_names(self._cluster.tasks, "ps", "worker")
        limit_s, option = self._timeouts.all_workers_s, "Timeouts.all_workers_s"
        wait = Wait("chief", "answer again", limit_s, time.monotonic(), option)
        while True:
            self._raise_if_server_gone(error)
            if silent := self.silent_servers(self._timeouts.ps_s):
                raise self.server_silent(silent) from error
            there = answering(tasks)
            if len(there) == len(tasks):
                break
            absent = [name for name in tasks if name not in there]
            missed = ", ".join(f"{name} ({tasks[name]})" for name in absent)
            if wait.waited_s == 0.0:
                tf.get_logger().warning("chief waits for %s, which is gone or stopped.", missed)
            try:
                look(wait, missed)
            except TimeoutError:
                raise WorkerLost(
                    f"Expected all workers to be there within {limit_s:g} s, "
                    f"as they share each batch. Received: no answer from {missed}. {START_AGAIN}"
                ) from error
            time.sleep(_POLL_S)
        # What fails here fails in the next step, too.
        with contextlib.suppress(tf.errors.OpError):
            context.context().update_server_def(context.get_server_def())
        self.generations = [generation + 1 for generation in self.generations]

    def generation(self, worker: int) -> int:
        """How often `worker` may have been lost, with all that it kept."""
        return self.generations[worker]

    def server_silent(self, silent: str) -> ServerLost:
        """The error that says so; `silent` is what `silent_servers` gave."""
        return ServerLost(
            f"Expected every parameter server to answer within {self._timeouts.ps_s:g} s. "
            f"Received: nothing from {silent}. {START_AGAIN}"
        )

    @property
    def num_losses(self) -> int:
        """How often workers may have been lost, all together."""
        return sum(self.generations)

    def await_worker(self, worker: int, generation: int) -> None:
        """Waits until `worker` answers and makes its devices known again.

        What has been done already since that `generation` is not done again: each device of a
        worker misses it.

        Nobody else waits with it: the others train on. `WorkerPool` gives up where all are lost.
        """
        address = self._cluster.tasks["worker"][worker]
        while True:
            while not is_answering(address):
                time.sleep(_POLL_S)
            try:
                with self._updating:
                    if self.generations[worker] != generation:
                        return
                    self.generations[worker] = generation = generation + 1
                    context.context().update_server_def(context.get_server_def())
                return
            except tf.errors.OpError:
                time.sleep(_POLL_S)  # it, or another worker, has gone again meanwhile


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
