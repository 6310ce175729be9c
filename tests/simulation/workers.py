"""Workers that save into one folder together, by `Agreement` and `StepAgreement`; started anew.

What TensorFlow's coordination service is to them, a store of keys that lives with the first one, is
played, and so is a step: all of them do it, or none. The launcher ends the others once one has
ended, as `launch/processes.py` does, and starts all again by `run_with_restarts`.
"""

from collections.abc import Sequence
from typing import Any

from tests.simulation.choices import Choices
from tests.simulation.disk import SimulatedDisk
from tests.simulation.faults import FaultInjector, Faults
from tests.simulation.fit import TOTAL, Training, Truth
from tests.simulation.world import Process, Violation, World
from tfparallel.callbacks.backup.storage import BackupError
from tfparallel.coordination.agreement import Agreement, DisagreementError
from tfparallel.launch.job_life import Ending
from tfparallel.launch.restarts import run_with_restarts

MAX_RESTARTS = 5
STALL_S, WRITE_S = 60.0, 90.0  # the agreement's limits
GRACE_S = 5.0  # of the launcher, between the first end and the last
_SLACK_S = 30.0  # looks at the store, and at who is alive


def run(choices: Choices) -> World:
    """A schedule; see `Truth` for what is checked all the time."""
    world = World(choices)
    disk = SimulatedDisk(world, (0.0, 0.0, 0.01)[choices.below(3)])
    truth = Truth(world, disk)
    num_workers = (2, 3)[choices.below(2)]
    options = {
        "save_freq": (1, 2, "epoch")[choices.below(3)],
        "keep": (2, 1)[choices.below(2)],
        "asynchronous": not choices.below(2),
        "lease_s": 4.0,
        "delete_on_success": not choices.below(2),
    }

    def power_fails() -> None:
        disk.power_fails()
        truth.power_failed()

    faults = Faults(most=(0, 1, 3)[choices.below(3)])
    FaultInjector(world, faults, lambda p: p.name.startswith("worker"), power_fails)
    job = _Job(world, truth, options, num_workers)
    world.process("launcher", job.main, "host")
    world.run()
    return world


class SimulatedStore:
    """See `coordination.store.Store`; it goes with the first worker.

    Args:
        world: where.
        workers: by rank; each is there once it has started.
    """

    def __init__(self, world: World, workers: Sequence[Process]):
        self._world, self._workers = world, workers
        self._values: dict[str, str] = {}

    def put(self, key: str, value: str) -> bool:
        self._require_service()
        return self._values.setdefault(key, value) is value

    def get(self, key: str, timeout_s: float) -> str:
        def is_there() -> bool:
            return key in self._values or self._workers[0].is_over

        is_known = self._world.wait(is_there, timeout_s)
        self._require_service()
        if not is_known:
            raise TimeoutError(key)
        return self._values[key]

    def delete(self, key: str) -> None:
        self._require_service()
        for own in [own for own in self._values if own == key or own.startswith(f"{key}/")]:
            del self._values[own]

    def describe(self, rank: int) -> str:
        return f"/job:worker/task:{rank}"

    def require_alive(self, rank: int) -> None:
        self._world.request()
        if self._workers[rank].is_over:
            raise ConnectionError("It has ended.")

    def _require_service(self) -> None:
        self._world.request()
        if self._workers[0].is_over:
            raise ConnectionError("The service has ended.")


class _Attempt:
    """One start of all workers."""

    def __init__(self, world: World, num_workers: int):
        self.world, self.num_workers = world, num_workers
        self.workers: list[Process] = []
        self.store = SimulatedStore(world, self.workers)
        self.trainings: dict[int, Training] = {}
        self._met: list[list[int]] = []  # the steps that workers are in, by how often they met

    def meet(self, count: int, num_steps: int) -> None:
        """A step that all do together; it fails where one has ended."""
        while len(self._met) <= count:
            self._met.append([])
        arrived = self._met[count]
        arrived.append(num_steps)
        if len(set(arrived)) > 1:
            self.world.fail(Violation(f"workers are in steps {arrived} at the same time"))
        limit_s = self.world.now_s + STALL_S
        while len(arrived) < self.num_workers:
            self.world.wait(lambda: len(arrived) == self.num_workers or self._has_gone(), 1.0)
            if len(arrived) < self.num_workers and (self._has_gone() or self.world.now_s > limit_s):
                raise ConnectionError("a collective has failed")

    def _has_gone(self) -> bool:
        return any(worker.is_over for worker in self.workers)


class _Job:
    """The launcher of several workers."""

    def __init__(self, world: World, truth: Truth, options: dict[str, Any], num_workers: int):
        self._world, self._truth, self._options = world, truth, options
        self._num_workers = num_workers
        self._last: _Attempt | None = None

    def main(self, launcher: Process) -> None:
        machine = launcher.machine
        status = run_with_restarts(
            self._run_once,
            MAX_RESTARTS,
            lambda text: None,
            wait=lambda seconds: machine.sleep(seconds),
            clock=machine.now_s,
        )
        done = [t.call.num_steps for t in self._last.trainings.values()] if self._last else []
        if status == 0 and done != [TOTAL] * self._num_workers:
            self._world.fail(Violation(f"ended with status 0 after steps {done}"))

    def _run_once(self, restart: int) -> Ending:
        attempt = self._last = _Attempt(self._world, self._num_workers)
        for rank in range(self._num_workers):

            def work(process: Process, rank: int = rank) -> None:
                self._train(process, attempt, rank, restart)

            attempt.workers.append(self._world.process(f"worker {rank}", work, "host"))
        workers = attempt.workers
        self._world.wait(lambda: any(w.is_over for w in workers))
        self._world.wait(lambda: all(w.is_over for w in workers), GRACE_S)
        slept_s = sum(w.was_stopped_s for w in workers)
        if all(w.error is None and w.has_ended for w in workers if w.is_over):
            # Nobody has failed: the others have to end by themselves, within their limits.
            limit_s = WRITE_S + STALL_S + _SLACK_S + slept_s
            if not self._world.wait(lambda: all(w.is_over for w in workers), limit_s):
                self._world.fail(Violation("workers wait for one that has done all"))
        self._check_exits(attempt)
        for worker in workers:
            self._world.end(worker)
        if all(w.error is None and w.has_ended for w in workers):
            return Ending(0)
        return Ending(1, failed_rank=0)

    def _check_exits(self, attempt: _Attempt) -> None:
        """After SIGTERM all that exit have saved at the end of the same step."""
        steps = {
            attempt.trainings[rank].call.num_steps
            for rank, worker in enumerate(attempt.workers)
            if isinstance(worker.error, SystemExit)
        }
        if len(steps) > 1:
            self._world.fail(Violation(f"workers exit after SIGTERM behind steps {steps}"))

    def _train(self, process: Process, attempt: _Attempt, rank: int, restart: int) -> None:
        place = (rank, self._num_workers, STALL_S, WRITE_S, process.machine)
        agreement = Agreement(attempt.store, "job", *place)
        counts = iter(range(10 * TOTAL))
        training = attempt.trainings[rank] = Training(
            process,
            self._truth,
            self._options,
            "host",
            agreement,
            meet=lambda num_steps: attempt.meet(next(counts), num_steps),
            term_chance=0.01,
            job=restart,
        )
        try:
            training.fit()
        except (BackupError, DisagreementError) as error:
            is_excused = self._truth.may_fail or any(
                w.is_over or w.was_stopped_s for w in attempt.workers
            )
            if not is_excused:
                self._world.fail(Violation(f"failed though all are there: {error}"))
            raise
        process.has_ended = True
