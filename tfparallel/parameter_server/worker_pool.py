"""The chief's threads, one for each worker: each takes the next step from one queue.

A slow worker takes fewer steps and delays nobody. What a step computes is applied by the parameter
servers, one step at a time (`effects.py`), so the order of updates is the order of arrival.

    submit --> queue --> thread of worker 0: compute on worker 0 --+
                    \\-> thread of worker 1: compute on worker 1 --+--> apply, one at a time
"""

import collections
import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfparallel.coordination.machine import THIS_MACHINE, Machine, Running
from tfparallel.coordination.patience import Wait
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.coordination.waiting import look
from tfparallel.parameter_server.batch_arguments import BatchArguments, Hosts
from tfparallel.parameter_server.recovery import Recovery, TaskLost
from tfparallel.parameter_server.remote_calls import own_executor
from tfparallel.parameter_server.remote_step import RemoteStep
from tfparallel.parameter_server.server_cluster import ParameterServerCluster
from tfparallel.parameter_server.staleness import StalenessBound


@dataclass
class QueuedStep:
    """One step on its way.

    Attributes:
        remote: what to run.
        arguments: on what.
        number: in the order of submission.
        is_done: outputs or an error are there.
        outputs: what the step gave, on the chief.
        worker: who computed it.
    """

    remote: RemoteStep
    arguments: BatchArguments
    number: int
    is_done: bool = False
    outputs: Any = None
    worker: int | None = None
    attempt: int = 0


class WorkerPool:
    """Runs steps on the workers of a cluster.

    Args:
        cluster: connected.
        devices: what each worker computes on.
        max_staleness: see `StalenessBound`.
        timeouts: when a worker or a server counts as lost.
        machine: what the chief runs on.
        recovery: tells who is lost; by default by asking the cluster.
        executor: what a thread's calls run in.
    """

    def __init__(
        self,
        cluster: ParameterServerCluster,
        devices: tuple[str, ...],
        max_staleness: int | None,
        timeouts: Timeouts,
        machine: Machine = THIS_MACHINE,
        recovery: Recovery | None = None,
        executor: Callable[[], Any] = own_executor,
    ):
        self._cluster, self._devices, self._timeouts = cluster, devices, timeouts
        self._machine, self._executor = machine, executor
        self._recovery = Recovery(cluster, timeouts) if recovery is None else recovery
        self._changed = machine.changes()  # guards everything below
        self._queue: collections.deque[QueuedStep] = collections.deque()
        self._under_way: dict[
            int, tuple[QueuedStep, Wait]
        ] = {}  # by worker, with the chief's wait for it
        self._staleness = StalenessBound(max_staleness)
        self._numbers = itertools.count()
        self._error: BaseException | None = None
        self._lost: set[int] = set()  # workers that are gone, or hold on to a step for too long
        self._is_applying = False
        self.steps_of_worker = [0] * len(devices)
        self._threads: list[Running] = []

    def generation(self, worker: int) -> int:
        """How often `worker` has been lost, with all that it kept."""
        return self._recovery.generations[worker]

    # ---- for the chief's own thread --------------------------------------------------------------

    def submit(self, remote: RemoteStep, arguments: BatchArguments) -> QueuedStep:
        """Queues a step; waits while two steps for each worker are queued already.

        Raises:
            Exception: what an earlier step raised.
        """
        self._start()
        with self._changed:
            self._wait_until(lambda: len(self._queue) < len(self._devices))
            step = QueuedStep(remote, arguments, next(self._numbers))
            self._queue.append(step)
            self._changed.notify_all()
            return step

    def wait(self, step: QueuedStep) -> object:
        """The outputs of `step`, when it is done."""
        with self._changed:
            self._wait_until(lambda: step.is_done)
        return step.outputs

    def join(self) -> None:
        """Waits until every submitted step has been applied.

        Raises:
            Exception: what a step raised; the steps that were queued are dropped.
        """
        if threading.current_thread() in self._threads:
            return
        with self._changed:
            self._wait_until(lambda: not self._queue and not self._under_way)

    @property
    def largest_staleness(self) -> int:
        """The largest staleness of an update so far."""
        with self._changed:
            return self._staleness.largest

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while True:
            if self._error is not None:
                error, self._error = self._error, None
                self._queue.clear()
                raise error
            if condition():
                return
            self._changed.wait(1.0)

    def _start(self) -> None:
        if self._threads:
            return
        for worker in range(len(self._devices)):
            work, name = functools.partial(self._work, worker), f"tfparallel worker {worker}"
            self._threads.append(self._machine.start(work, name))
        self._threads.append(self._machine.start(self._watch, "tfparallel pool"))

    # ---- for the thread of a worker --------------------------------------------------------------

    def _work(self, worker: int) -> None:
        executor = self._executor()
        while True:
            step = self._take(worker)
            try:
                self._run(worker, step, executor)
                self._is_back(worker)
            except TaskLost as lost:
                executor.clear_error()
                self._give_back(worker, step)
                self._await_worker(worker, lost)
            except BaseException as error:
                executor.clear_error()
                self._fail(worker, step, error)
                self._is_back(worker)

    def _take(self, worker: int) -> QueuedStep:
        with self._changed:
            while not (self._queue and self._staleness.may_start()):
                self._changed.wait()
            step = self._queue.popleft()
            step.worker = worker
            step.attempt += 1
            self._staleness.start(step.number)
            self._under_way[worker] = (step, self._wait_for(step))
            self._changed.notify_all()
            return step

    def _run(self, worker: int, step: QueuedStep, executor: Any) -> None:
        attempt, device = step.attempt, self._devices[worker]
        with self._recovery.of_worker(worker):
            arguments = step.arguments.tensors(Hosts.of_one(worker, device))
            outputs, effects, kept = step.remote.compute(worker, device, arguments)
            outputs = step.remote.fetch(self._cluster.chief_device, outputs)
            executor.wait()
        with self._changed:
            while self._owns(worker, step, attempt) and not (
                not self._is_applying and self._staleness.may_apply(step.number)
            ):
                self._changed.wait()
            if not self._owns(worker, step, attempt):
                return  # it was given to another worker while this one was silent
            self._is_applying = True
        is_applied = False
        try:
            if step.remote.has_effects:
                with self._recovery.of_servers():
                    step.remote.apply(self._cluster.ps_devices[0], effects)
                    executor.wait()
                step.remote.keep(worker, kept)
            is_applied = True
        finally:
            with self._changed:  # at once: nobody may see it applied and still under way
                self._is_applying = False
                if is_applied:
                    self._note_applied(worker, step, outputs)
                self._changed.notify_all()

    def _note_applied(self, worker: int, step: QueuedStep, outputs: object) -> None:
        step.outputs = outputs
        if step.remote.has_effects:
            self._staleness.apply(step.number)
        else:
            self._staleness.forget(step.number)
        self.steps_of_worker[worker] += 1
        self._end(worker, step)

    def _owns(self, worker: int, step: QueuedStep, attempt: int) -> bool:
        """Whether `step` is still this worker's to finish."""
        under_way = self._under_way.get(worker)
        return under_way is not None and under_way[0] is step and step.attempt == attempt

    def _end(self, worker: int, step: QueuedStep) -> None:
        self._under_way.pop(worker, None)  # the watch may have given all up meanwhile
        step.is_done = True
        self._changed.notify_all()

    def _give_back(self, worker: int, step: QueuedStep) -> None:
        """`step` left no trace: someone else takes it next."""
        with self._changed:
            under_way = self._under_way.get(worker)
            if under_way is not None and under_way[0] is step:
                del self._under_way[worker]
                self._staleness.forget(step.number)
                self._queue.appendleft(step)
            self._changed.notify_all()

    def _fail(self, worker: int, step: QueuedStep, error: BaseException) -> None:
        with self._changed:
            if worker in self._under_way and self._under_way[worker][0] is step:
                self._staleness.forget(step.number)
                self._end(worker, step)
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _await_worker(self, worker: int, lost: TaskLost) -> None:
        name = self._cluster.describe("worker", worker)
        tf.get_logger().warning("%s is lost (%s); its step goes to another.", name, lost.reason)
        with self._changed:
            self._lost.add(worker)
        self._recovery.await_worker(worker)
        tf.get_logger().warning("%s is back.", name)
        self._is_back(worker)

    def _is_back(self, worker: int) -> None:
        with self._changed:
            self._lost.discard(worker)

    # ---- the watch -------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Takes steps from workers that are silent, and gives up where nobody is left."""
        for_anyone: Wait | None = None
        while True:
            self._machine.sleep(0.5)
            with self._changed:
                is_working = bool(self._queue or self._under_way)
            silent = self._recovery.silent_servers(self._timeouts.ps_s) if is_working else ""
            with self._changed:
                self._take_from_slow()
                are_all_lost = is_working and len(self._lost) == len(self._devices)
                for_anyone = (for_anyone or self._wait_for_anyone()) if are_all_lost else None
                error = self._hopeless(for_anyone, silent)
                if error is not None and self._error is None and (self._queue or self._under_way):
                    self._error, for_anyone = error, None
                    self._queue.clear()
                    self._under_way.clear()
                    self._changed.notify_all()

    def _wait_for(self, step: QueuedStep) -> Wait:
        limit_s, option = self._timeouts.worker_s, "Timeouts.worker_s"
        return Wait("chief", f"finish step {step.number}", limit_s, self._machine.now_s(), option)

    def _wait_for_anyone(self) -> Wait:
        limit_s, option = self._timeouts.all_workers_s, "Timeouts.all_workers_s"
        return Wait("chief", "come back", limit_s, self._machine.now_s(), option)

    def _take_from_slow(self) -> None:
        for worker, (step, wait) in list(self._under_way.items()):
            if step.worker != worker or self._is_applying or worker in self._lost:
                continue
            try:
                look(wait, self._cluster.describe("worker", worker), self._machine)
            except TimeoutError as error:
                tf.get_logger().warning("%s Its step goes to another.", error)
                del self._under_way[worker]
                self._lost.add(worker)
                self._staleness.forget(step.number)
                self._queue.appendleft(step)
                self._changed.notify_all()

    def _hopeless(self, for_anyone: Wait | None, silent_servers: str) -> Exception | None:
        if silent_servers:
            return self._recovery.server_silent(silent_servers)
        if for_anyone is not None:
            try:
                look(for_anyone, self._describe_lost(), self._machine)
            except TimeoutError as error:
                return error
        return None

    def _describe_lost(self) -> str:
        return ", ".join(self._cluster.describe("worker", worker) for worker in sorted(self._lost))
