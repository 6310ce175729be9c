"""The launcher of one host: what it starts fails, forks, will not end; it is told to stop, or dies.

`JobLife`, `run_with_restarts` and the guard's `kill_until_none` are the package's own. Played are
processes, their groups, marks and outputs, signals, and the kernel, which ends a worker with its
launcher.

Checked: of a job nothing is left, whoever died, in a limited time; the exit status is that of who
failed first; SIGTERM comes once, SIGKILL not before its time; restarts are counted, and none comes
after a stop or while anything of the attempt before it lives.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.choices import Choices
from tests.simulation.faults import FaultInjector, Faults
from tests.simulation.world import Process, Violation, World
from tfparallel.launch.failure import exit_status
from tfparallel.launch.job_life import Ending, Event, Exited, JobLife, OutputEnded, Signalled
from tfparallel.launch.leftovers import kill_until_none
from tfparallel.launch.restarts import LONGEST_PAUSE_S, USELESS_STATUSES, run_with_restarts

_IMPATIENCE_S = 0.5  # before which a second Ctrl-C is the first one's echo
_SLACK_S = 3.0  # for requests, and the guard's looks
_FOREVER_S = 300.0  # for which a process that will not end goes on


def run(choices: Choices) -> World:
    """A schedule."""
    world = World(choices, limit_s=3000.0)
    host = _Host(world)
    faults = Faults(kill=0.002, stop=0.002, jump=0.0, power=0.0, most=(0, 1, 3)[choices.below(3)])
    FaultInjector(world, faults, host.may_be_hit)
    host.launcher = world.process("launcher", host.launch, "host")
    world.process("operator", lambda process: host.operate(), "host")
    world.run()
    return world


@dataclass
class _Task:
    """A process of a job.

    Attributes:
        process: it.
        rank: of the worker that it is, or is a child of.
        attempt: which carries its mark.
        is_worker: whether the launcher has started it.
        is_in_group: whether it is in its worker's process group.
        holds_outputs: whether it could still write to its worker's outputs.
        told_s: when it got SIGTERM; negative before.
        returncode: how it has ended, if it has by itself.
    """

    process: Process
    rank: int
    attempt: int
    is_worker: bool
    is_in_group: bool = True
    holds_outputs: bool = True
    told_s: float = -1.0
    returncode: int = -signal.SIGKILL

    @property
    def is_told(self) -> bool:
        return self.told_s >= 0


class _Host:
    """What runs on the host: the launcher, the operator, the guards, and all tasks ever started."""

    launcher: Process

    def __init__(self, world: World):
        self.world = world
        below = world.choices.below
        self.num_workers, self.grace_s = 1 + below(3), (5.0, 1.0, 0.0)[below(3)]
        self._max_restarts = (0, 1, 3)[below(3)]
        self.tasks: list[_Task] = []
        self.events: list[Event] | None = None  # None: no handler of signals is there
        self.signals: list[tuple[float, int]] = []
        self._pauses, self._attempts = [0.0], 0
        self._last = Ending(0)

    def may_be_hit(self, process: Process) -> bool:
        """All but guards and the operator: who kills both launcher and guard leaves nobody."""
        return process is self.launcher or process.name.startswith("worker")

    def living(self, attempt: int) -> list[_Task]:
        """The tasks of an attempt that still run."""
        return [t for t in self.tasks if t.attempt == attempt and not t.process.is_over]

    # ---- the operator ----------------------------------------------------------------------------

    def operate(self) -> None:
        """Tells the launcher to stop, once or several times, or never."""
        below = self.world.choices.below
        for _ in range((0, 0, 1, 2, 3)[below(5)]):
            self.world.sleep((0.01, 0.3, 1.0, 4.0, 30.0)[below(5)])
            self._signal((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[below(3)])

    def _signal(self, number: int) -> None:
        self.world.note(f"signal {number}")
        if self.events is not None:
            self.signals.append((self.world.now_s, number))
            self.events.append(Signalled(number))
        elif not self.launcher.is_over:
            self.world.end(self.launcher)

    # ---- the launcher ----------------------------------------------------------------------------

    def launch(self, launcher: Process) -> None:
        """`tfparallel launch --max-restarts`."""
        launcher.at_end.append(self._kernel_ends_workers)
        run_with_restarts(
            self._run_once,
            self._max_restarts,
            lambda text: None,
            wait=self._wait_for_stop,
            clock=launcher.machine.now_s,
        )
        if self._attempts > self._max_restarts + 1:
            self.world.fail(Violation(f"started {self._attempts} times"))

    def _kernel_ends_workers(self) -> None:
        for task in self.tasks:
            if task.is_worker:
                self.world.end(task.process)

    def _wait_for_stop(self, seconds: float) -> int | None:
        if not 0 < seconds <= max(1.0, min(2 * self._pauses[-1], LONGEST_PAUSE_S)):
            self.world.fail(Violation(f"a pause of {seconds} s after {self._pauses}"))
        self._pauses.append(seconds)
        events = self.events = []
        self.world.wait(lambda: bool(events), seconds)
        self.events = None
        if events:
            self._last = Ending(128 + events[0].number)
        return events[0].number if events else None

    def _run_once(self, restart: int) -> Ending:
        if restart != self._attempts:
            self.world.fail(Violation(f"restart {restart} is attempt {self._attempts}"))
        if restart and (self._last.failed_rank is None or self._last.status in USELESS_STATUSES):
            self.world.fail(Violation(f"started again after {self._last}"))
        if alive := [t.process.name for t in self.tasks if not t.process.is_over]:
            self.world.fail(Violation(f"started again while these live: {alive}"))
        attempt, self._attempts = self._attempts, self._attempts + 1
        self.events = []
        guard = _Guard(self, attempt)
        group = _Group(self, attempt, self.events)
        try:
            ending = self._last = JobLife(group, self.launcher.machine.now_s).run(self.grace_s)
        except OSError as error:  # a worker could not be started
            self.world.note(f"gives up: {error}")
            ending = self._last = Ending(1)
        guard.close()
        self.events = None
        _Checks(self, group, ending).all()
        return ending


class _Guard:
    """The process of `leftovers.py`, which waits for the end of the launcher."""

    def __init__(self, host: _Host, attempt: int):
        self._host, self._world, self._attempt = host, host.world, attempt
        self._is_closed = False
        self._process = host.world.process("guard", self._main, "host")

    def close(self) -> None:
        """The launcher lets go, and waits."""
        self._is_closed = True
        self._world.wait(lambda: self._process.is_over)

    def _main(self, process: Process) -> None:
        world, host = self._world, self._host
        world.wait(lambda: self._is_closed or host.launcher.is_over)
        began_s = world.now_s

        def living() -> list[int]:
            world.request()
            return [t.process.pid for t in host.living(self._attempt)]

        def kill(pid: int) -> None:
            world.request()
            for each in host.world.processes:
                if each.pid == pid:
                    world.end(each)

        kill_until_none(living, kill, world.sleep)
        if left := [t.process.name for t in host.living(self._attempt)]:
            world.fail(Violation(f"these are left behind: {left}"))
        if world.now_s - began_s > _SLACK_S:
            world.fail(Violation(f"the guard took {world.now_s - began_s:.0f} s"))


class _Group:
    """See `job_life.ProcessGroup`."""

    def __init__(self, host: _Host, attempt: int, events: list[Event]):
        self._host, self._world, self.attempt, self._events = host, host.world, attempt, events
        self.labels = [f"worker {rank}" for rank in range(host.num_workers)]
        self.workers: list[_Task] = []
        self.told_s = -1.0
        self.failed_to_start = -1
        if self._world.choices.below(16) == 15:
            self.failed_to_start = self._world.choices.below(host.num_workers)

    def start(self) -> None:
        for rank, label in enumerate(self.labels):
            self._world.request()
            if rank == self.failed_to_start:
                raise OSError(f"cannot fork {label}")
            worker = self._task(label, rank, is_worker=True)
            self.workers.append(worker)
            machine = self._host.launcher.machine
            machine.start(lambda worker=worker: self._watch(worker), "watch")
            for _ in range(2):
                machine.start(lambda rank=rank: self._relay(rank), "relay")

    def num_started(self) -> int:
        return len(self.workers)

    def next_event(self, timeout_s: float | None) -> Event | None:
        is_there = self._world.wait(lambda: bool(self._events), timeout_s)
        return self._events.pop(0) if is_there else None

    def terminate(self) -> None:
        self.told_s = self._world.now_s
        for worker in self.workers:
            self._world.request()
            for task in self._host.living(self.attempt):
                if task.is_in_group and task.rank == worker.rank:
                    self._tell(task)
        for task in self._marked():
            if not task.is_in_group:
                self._world.request()
                self._tell(task)

    def kill(self) -> None:
        for worker in self.workers:
            self._world.request()
            for task in self._host.living(self.attempt):
                if task.is_in_group and task.rank == worker.rank:
                    self._check_time(task)
                    self._world.end(task.process)
        self._world.wait(lambda: all(worker.process.is_over for worker in self.workers))

    def is_any_left(self) -> bool:
        return bool(self._marked())

    def note(self, text: str) -> None:
        self._world.note(text)

    # ---- what is played --------------------------------------------------------------------------

    def _marked(self) -> list[_Task]:
        self._world.request()
        return self._host.living(self.attempt)

    def _tell(self, task: _Task) -> None:
        if task.is_told:
            self._world.fail(Violation(f"{task.process.name} gets SIGTERM twice"))
        task.told_s = self._world.now_s

    def _check_time(self, task: _Task) -> None:
        """Who is killed had its time to end, unless a person has pressed Ctrl-C once more."""
        now_s, stopped_s = self._world.now_s, self._host.launcher.was_stopped_s
        is_hurried = any(
            number == signal.SIGINT and at_s > self.told_s + _IMPATIENCE_S - stopped_s
            for at_s, number in self._host.signals
        )
        is_early = now_s < self.told_s + self._host.grace_s - 1e-6
        if is_early and not is_hurried and (task.is_worker or task.holds_outputs):
            self._world.fail(
                Violation(f"{task.process.name} is killed {now_s - self.told_s} s after SIGTERM")
            )

    def _watch(self, worker: _Task) -> None:
        self._world.wait(lambda: worker.process.is_over)
        self._world.request()
        self._events.append(Exited(worker.rank, worker.returncode))

    def _relay(self, rank: int) -> None:
        def has_ended() -> bool:
            living = self._host.living(self.attempt)
            return not any(task.rank == rank and task.holds_outputs for task in living)

        self._world.wait(has_ended)
        self._world.request()
        self._events.append(OutputEnded(rank))

    def _task(self, name: str, rank: int, is_worker: bool) -> _Task:
        task: _Task
        process = self._world.process(name, lambda process: self._live(task), "host")
        task = _Task(process, rank, self.attempt, is_worker)
        self._host.tasks.append(task)
        return task

    def _live(self, task: _Task) -> None:
        """A process of the job: works, forks, ends; at SIGTERM it ends soon, late or never."""
        world, below = self._world, self._world.choices.below
        for _ in range((0, 0, 0, 1, 2)[below(5)] if len(self._host.tasks) < 12 else 0):
            world.sleep((0.0, 0.5, 3.0)[below(3)])
            self._fork(task)
        if not world.wait(lambda: task.is_told, (0.5, 3.0, 20.0)[below(3)]):
            codes = (0, 0, 0, 1, 143, 2, -signal.SIGSEGV)
            task.returncode = codes[below(len(codes))]
            return
        kind = below(4)
        if kind == 3 and len(self._host.tasks) < 12:
            world.sleep((0.01, 0.2)[below(2)])
            self._fork(task)
        world.sleep((0.0, 0.5, _FOREVER_S, 2.0)[kind])
        task.returncode = (143, 0)[below(2)]

    def _fork(self, parent: _Task) -> None:
        below = self._world.choices.below
        child = self._task(f"{parent.process.name}'s child", parent.rank, is_worker=False)
        child.is_in_group = parent.is_in_group and not below(2)
        child.holds_outputs = parent.holds_outputs and not below(2)
        # A signal to the group that came before the fork was for the parent alone.


class _Checks:
    """What must be so when a job has ended.

    Args:
        host, group: where, and of whom.
        ending: what the launcher says of it.
    """

    def __init__(self, host: _Host, group: _Group, ending: Ending):
        self._host, self._group, self._ending, self._world = host, group, ending, host.world

    def all(self) -> None:
        """Ends the world where one is not so."""
        for check in (self._nothing_is_left, self._status_is_right, self._is_in_time):
            check()

    def _require(self, is_right: bool, text: Callable[[], str]) -> None:
        if not is_right:
            self._world.fail(Violation(text()))

    def _nothing_is_left(self) -> None:
        living = [t.process.name for t in self._host.living(self._group.attempt)]
        self._require(not living, lambda: f"these are left behind: {living}")

    def _status_is_right(self) -> None:
        ending, workers, group = self._ending, self._group.workers, self._group
        codes = [worker.returncode for worker in workers]
        if group.failed_to_start >= 0:
            return
        if ending.failed_rank is not None:
            worker = workers[ending.failed_rank]
            self._require(
                worker.returncode != 0 and ending.status == exit_status(worker.returncode),
                lambda: f"{ending}, of exit statuses {codes}",
            )
            self._require(
                not worker.is_told or worker.told_s >= group.told_s,
                lambda: f"{ending}, which was told to end before that",
            )
        elif ending.status == 0:
            self._require(not any(codes), lambda: f"{ending}, of exit statuses {codes}")
        else:
            sent = [128 + number for _, number in self._host.signals]
            self._require(ending.status in sent, lambda: f"{ending}, after signals {sent}")

    def _is_in_time(self) -> None:
        stopped_s = sum(p.was_stopped_s for p in self._world.processes)
        took_s = self._world.now_s - self._group.told_s
        limit_s = self._host.grace_s + stopped_s + 2 * _SLACK_S
        self._require(took_s <= limit_s, lambda: f"stopping took {took_s:.1f} s")
