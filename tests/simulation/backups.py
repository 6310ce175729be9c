"""Jobs that save into one folder: killed, stopped, without power, on full disks, started again."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.simulation.choices import Choices
from tests.simulation.disk import SimulatedDisk
from tests.simulation.faults import FaultInjector, Faults
from tests.simulation.fit import TOTAL, Training, Truth
from tests.simulation.world import Process, Violation, World
from tfparallel.callbacks.backup.storage import BackupError, LeaseError
from tfparallel.launch.job_life import Ending
from tfparallel.launch.restarts import LONGEST_PAUSE_S, run_with_restarts

MAX_RESTARTS = 8
_SLACK_S = 3.0  # for requests, and the looks between them


def run(choices: Choices) -> World:
    """A schedule; see `Truth` for what is checked all the time."""
    world, num_jobs = World(choices), drawn_jobs(choices)
    disk = SimulatedDisk(world, (0.0, 0.0, 0.01)[choices.below(3)])
    truth = Truth(world, disk)

    def power_fails() -> None:
        disk.power_fails()
        truth.power_failed()

    start_jobs(world, truth, num_jobs, Faults(), power_fails)
    world.run()
    return world


def drawn_jobs(choices: Choices) -> int:
    """How many there are."""
    return (1, 1, 2, 2, 3)[choices.below(5)]


def start_jobs(
    world: World,
    truth: Truth,
    num_jobs: int,
    faults: Faults,
    power_fails: Callable[[], None] = lambda: None,
) -> None:
    """Launchers whose jobs save into one folder, with drawn options, to which faults happen."""
    choices = world.choices
    same_host = bool(choices.below(2))
    lease_s = (4.0, 1.0)[choices.below(2)]
    options = {
        "save_freq": (1, 2, "epoch")[choices.below(3)],
        "keep": (2, 1, 3)[choices.below(3)],
        "asynchronous": not choices.below(2),
        "lease_s": lease_s,
        "on_error": ("raise", "warn")[choices.below(2)],
        "delete_on_success": not choices.below(2),
    }
    faults = dataclasses.replace(faults, most=(0, 2, 4, 8)[choices.below(4)])
    FaultInjector(world, faults, lambda p: p.name.startswith("job"), power_fails)
    for job in range(num_jobs):
        host = "host" if same_host else f"host-{job}"
        world.process(f"launcher {job}", _Job(world, truth, options, job, host).main, host)


class _Job:
    """A job that is started again when it fails, by the launcher's own loop."""

    def __init__(self, world: World, truth: Truth, options: dict[str, Any], job: int, host: str):
        self._world, self._truth, self._options = world, truth, options
        self._job, self._host = job, host
        self._training: Training | None = None
        self._num_runs, self._pauses = 0, [0.0]

    def main(self, launcher: Process) -> None:
        def wait(seconds: float) -> None:
            if not 0 < seconds <= max(1.0, min(2 * self._pauses[-1], LONGEST_PAUSE_S)):
                self._world.fail(Violation(f"a pause of {seconds} s after {self._pauses}"))
            self._pauses.append(seconds)
            launcher.machine.sleep(seconds)

        machine = launcher.machine
        status = run_with_restarts(
            self._run_once, MAX_RESTARTS, lambda text: None, wait=wait, clock=machine.now_s
        )
        if self._num_runs > MAX_RESTARTS + 1:
            self._world.fail(Violation(f"started {self._num_runs} times"))
        if status == 0 and (self._training is None or self._training.call.num_steps != TOTAL):
            self._world.fail(Violation("ended with status 0 and has not done all steps"))

    def _run_once(self, restart: int) -> Ending:
        self._num_runs += 1
        process = self._world.process(f"job {self._job}", self._train, self._host)
        self._world.wait(lambda: process.is_over)
        error = process.error
        has_trained = self._training is not None and self._training.call.num_steps == TOTAL
        if error is None and has_trained and process.has_ended:
            return Ending(0)
        return Ending(143 if isinstance(error, SystemExit) else 1, failed_rank=0)

    def _train(self, process: Process) -> None:
        self._training = Training(process, self._truth, self._options, self._host, term_chance=0.02)
        try:
            self._training.fit()
        except LeaseError:
            raise
        except BackupError as error:
            if not self._truth.may_fail and "in use by" not in str(error):
                self._world.fail(Violation(f"failed on a disk that does not: {error}"))
            raise
        process.has_ended = True
