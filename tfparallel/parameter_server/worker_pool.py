"""The chief's threads, one for each device of a worker: each takes the next step from one queue.

A slow device takes fewer steps and delays nobody (each is a lane: `worker_lanes.py`). What a step
computes is applied by the parameter servers, one step at a time (`effects.py`), so the order of
updates is the order of arrival.

    submit --> queue --> thread of lane 0: compute on its device --+
                    \\-> thread of lane 1: compute on its device --+--> apply, one at a time
"""

import collections
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfparallel.coordination.machine import THIS_MACHINE, Machine, Running
from tfparallel.coordination.patience import Wait
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.coordination.waiting import look
from tfparallel.parameter_server.batch_arguments import BatchArguments, Hosts
from tfparallel.parameter_server.recovery import Recovery, TaskLost
from tfparallel.parameter_server.remote_calls import CallsOfThread, own_executor
from tfparallel.parameter_server.remote_step import RemoteStep
from tfparallel.parameter_server.server_cluster import ParameterServerCluster
from tfparallel.parameter_server.staleness import StalenessBound
from tfparallel.parameter_server.worker_lanes import CallsOfWorkers, Lane
from tfparallel.replicas.device_names import short_names


@dataclass
class QueuedStep:
    """One step on its way.

    Attributes:
        remote: what to run.
        arguments: on what.
        number: in the order of submission.
        is_done: outputs or an error are there.
        outputs: what the step gave, on the chief.
        lane: who computed it.
    """

    remote: RemoteStep
    arguments: BatchArguments
    number: int
    is_done: bool = False
    outputs: Any = None
    lane: int | None = None
    attempt: int = 0


class WorkerPool:
    """Runs steps on the workers of a cluster.

    Args:
        cluster: connected.
        lanes: what computes, a step at a time each.
        max_staleness: see `StalenessBound`.
        timeouts: when a worker or a server counts as lost.
        machine: what the chief runs on.
        recovery: tells who is lost; by default by asking the cluster.
        executor: what a thread's calls run in.
    """

    def __init__(
        self,
        cluster: ParameterServerCluster,
        lanes: tuple[Lane, ...],
        max_staleness: int | None,
        timeouts: Timeouts,
        machine: Machine = THIS_MACHINE,
        recovery: Recovery | None = None,
        executor: Callable[[], CallsOfThread] = own_executor,
    ):
        self._cluster, self._lanes, self._timeouts = cluster, lanes, timeouts
        self._machine, self._executor = machine, executor
        self._recovery = Recovery(cluster, timeouts) if recovery is None else recovery
        self._changed = machine.changes()  # guards everything below
        self._queue: collections.deque[QueuedStep] = collections.deque()
        self._under_way: dict[
            int, tuple[QueuedStep, Wait]
        ] = {}  # by lane, with the chief's wait for it
        self._staleness = StalenessBound(max_staleness)
        self._calls = CallsOfWorkers(cluster.num_workers)
        self._numbers = itertools.count()
        self._error: BaseException | None = None
        self._lost: set[int] = set()  # lanes that are gone, or hold on to a step for too long
        self._is_applying = False
        self.steps_of_lane = [0] * len(lanes)
        self._threads: list[Running] = []

    def generation(self, lane: int) -> int:
        """How often a lane's worker has been lost, with all that it kept."""
        return self._recovery.generations[self._lanes[lane].worker]

    # ---- for the chief's own thread --------------------------------------------------------------

    def submit(self, remote: RemoteStep, arguments: BatchArguments) -> QueuedStep:
        """Queues a step; waits while a step for each lane is queued already.

        Raises:
            Exception: what an earlier step raised.
        """
        self._start()
        with self._changed:
            self._wait_until(lambda: len(self._queue) < len(self._lanes))
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
        for lane in range(len(self._lanes)):
            work, name = functools.partial(self._work, lane), f"tfparallel lane {lane}"
            self._threads.append(self._machine.start(work, name))
        self._threads.append(self._machine.start(self._watch, "tfparallel pool"))

    # ---- for the thread of a lane ----------------------------------------------------------------

    def _work(self, lane: int) -> None:
        executor = self._executor()
        while True:
            step = self._take(lane)
            generation = self.generation(lane)
            try:
                self._run(lane, step, executor)
                self._is_back(lane)
            except TaskLost as lost:
                executor.clear_error()
                self._give_back(lane, step)
                self._await_worker(lane, lost, generation)
            except BaseException as error:
                executor.clear_error()
                self._fail(lane, step, error)
                self._is_back(lane)

    def _take(self, lane: int) -> QueuedStep:
        with self._changed:
            while not (self._queue and self._staleness.may_start()):
                self._changed.wait()
            step = self._queue.popleft()
            step.lane = lane
            step.attempt += 1
            self._staleness.start(step.number)
            self._under_way[lane] = (step, self._wait_for(step))
            self._changed.notify_all()
            return step

    def _run(self, lane: int, step: QueuedStep, executor: CallsOfThread) -> None:
        attempt, device = step.attempt, self._lanes[lane].device
        with self._recovery.of_worker(self._lanes[lane].worker):
            arguments = step.arguments.tensors(Hosts.of_one(lane, device))
            with self._turn(lane, step, step.remote.call(lane, arguments)):
                computed, effects, kept = step.remote.compute(lane, device, arguments)
                outputs = step.remote.fetch(self._cluster.chief_device, computed)
                executor.wait()
        with self._changed:
            while self._owns(lane, step, attempt) and not (
                not self._is_applying and self._staleness.may_apply(step.number)
            ):
                self._changed.wait()
            if not self._owns(lane, step, attempt):
                return  # it was given to another lane while this one was silent
            self._is_applying = True
        is_applied = False
        try:
            if step.remote.has_effects:
                with self._recovery.of_servers():
                    step.remote.apply(self._cluster.ps_devices[0], effects)
                    executor.wait()
                step.remote.keep(lane, kept)
            is_applied = True
        finally:
            with self._changed:  # at once: nobody may see it applied and still under way
                self._is_applying = False
                if is_applied:
                    self._note_applied(lane, step, outputs)
                self._changed.notify_all()

    def _note_applied(self, lane: int, step: QueuedStep, outputs: object) -> None:
        step.outputs = outputs
        if step.remote.has_effects:
            self._staleness.apply(step.number)
        else:
            self._staleness.forget(step.number)
        self.steps_of_lane[lane] += 1
        self._end(lane, step)

    @contextlib.contextmanager
    def _turn(self, lane: int, step: QueuedStep, call: Hashable) -> Iterator[None]:
        """Around a call: waits until its worker may run it."""
        attempt, has_run = step.attempt, False
        with self._changed:
            turn = self._calls.ask(self._lanes[lane].worker, call, self._recovery.num_losses)
            while not self._calls.may_begin(turn):
                self._changed.wait()
            self._calls.begin(turn)
            if self._owns(lane, step, attempt):  # what it waited for was not its own
                self._under_way[lane] = (step, self._wait_for(step))
        try:
            yield
            has_run = True
        finally:
            with self._changed:
                self._calls.end(turn, has_run)
                self._changed.notify_all()

    def _owns(self, lane: int, step: QueuedStep, attempt: int) -> bool:
        """Whether `step` is still this lane's to finish."""
        under_way = self._under_way.get(lane)
        return under_way is not None and under_way[0] is step and step.attempt == attempt

    def _end(self, lane: int, step: QueuedStep) -> None:
        self._under_way.pop(lane, None)  # the watch may have given all up meanwhile
        step.is_done = True
        self._changed.notify_all()

    def _give_back(self, lane: int, step: QueuedStep) -> None:
        """`step` left no trace: someone else takes it next."""
        with self._changed:
            under_way = self._under_way.get(lane)
            if under_way is not None and under_way[0] is step:
                del self._under_way[lane]
                self._staleness.forget(step.number)
                self._queue.appendleft(step)
            self._changed.notify_all()

    def _fail(self, lane: int, step: QueuedStep, error: BaseException) -> None:
        with self._changed:
            if lane in self._under_way and self._under_way[lane][0] is step:
                self._staleness.forget(step.number)
                self._end(lane, step)
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _await_worker(self, lane: int, lost: TaskLost, generation: int) -> None:
        name = self._name(lane)
        tf.get_logger().warning("%s is lost (%s); its step goes to another.", name, lost.reason)
        with self._changed:
            self._lost.add(lane)
        self._recovery.await_worker(self._lanes[lane].worker, generation)
        tf.get_logger().warning("%s is back.", name)
        self._is_back(lane)

    def _is_back(self, lane: int) -> None:
        with self._changed:
            self._lost.discard(lane)

    # ---- the watch -------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Takes steps from lanes that are silent, and gives up where nobody is left."""
        for_anyone: Wait | None = None
        while True:
            self._machine.sleep(0.5)
            with self._changed:
                is_working = bool(self._queue or self._under_way)
            silent = self._recovery.silent_servers(self._timeouts.ps_s) if is_working else ""
            with self._changed:
                self._take_from_slow()
                are_all_lost = is_working and len(self._lost) == len(self._lanes)
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
        for lane, (step, wait) in list(self._under_way.items()):
            if step.lane != lane or self._is_applying or lane in self._lost:
                continue
            try:
                look(wait, self._name(lane), self._machine)
            except TimeoutError as error:
                tf.get_logger().warning("%s Its step goes to another.", error)
                del self._under_way[lane]
                self._lost.add(lane)
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
        return ", ".join(self._name(lane) for lane in sorted(self._lost))

    def _name(self, lane: int) -> str:
        """A lane as messages name it: by its worker, and by its device where that has several."""
        worker, device = self._lanes[lane].worker, self._lanes[lane].device
        of_worker = [each for each in self._lanes if each.worker == worker]
        name = self._cluster.describe("worker", worker)
        return name if len(of_worker) == 1 else f"{name} {short_names([device])[0]}"
