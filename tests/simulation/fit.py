"""`Model.fit` with the backup callback, in a simulated world: all but Keras is the package's own.

`BackupAndRestore`, its lease, writer, commit, search and agreements run as they are, on simulated
disks, threads and clocks. What they ask of Keras and TensorFlow (`FitCall`, `InputPosition`,
`take_snapshot`, `Restoration`) is played here: a model is two numbers, how many steps it has had
and a hash of them, so that a step which is lost, done twice or done out of order shows.
"""

import contextlib
import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tests.simulation.disk import MountedDisk, SimulatedDisk, _Folder
from tests.simulation.world import Process, Violation, World
from tfparallel.callbacks.backup import callback as callback_module
from tfparallel.callbacks.backup.backup_names import drafts, numbered
from tfparallel.callbacks.backup.callback import BackupAndRestore
from tfparallel.callbacks.backup.held_lease import Lease
from tfparallel.callbacks.backup.part import BackupPart
from tfparallel.callbacks.backup.schema import Owner
from tfparallel.callbacks.backup.search import FoundBackup
from tfparallel.callbacks.backup.snapshot import TrainingProgress
from tfparallel.callbacks.backup.storage import InvalidBackupError, LeaseError, Storage
from tfparallel.coordination.agreement import Agreement
from tfparallel.coordination.writer import Writer
from tfparallel.replicas.random_states import host_random_state

FOLDER = Path("/shared/backups")
EPOCHS, STEPS_PER_EPOCH = 3, 4
TOTAL = EPOCHS * STEPS_PER_EPOCH
_NAMED = re.compile(r"process \d+ on host \S+, job '|no claim on it|its claim is damaged")


def hash_after(num_steps: int) -> int:
    """What a training has computed that did each step once, in order."""
    value = 0
    for step in range(num_steps):
        value = next_hash(value, step)
    return value


def next_hash(value: int, step: int) -> int:
    """What one step makes of it."""
    digest = hashlib.blake2b(f"{value} {step}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


class Truth:
    """What has happened, as an observer who sees everything knows it, and what must never happen.

    Args:
        world, disk: where.
    """

    def __init__(self, world: World, disk: SimulatedDisk):
        self.world, self.disk = world, disk
        self.may_fail = bool(disk.error_chance)
        self._wake_chance = (0.0, 0.2, 0.5)[world.choices.below(3)]
        self.most_steps = 0  # that any process has done
        self.newest_owner = (0, "")  # fencing number and token of who has last taken the folder
        self.published: dict[int, str] = {}  # number and token of all that were ever published
        self.certain: dict[int, int] = {}  # number and steps of those that a power failure leaves
        self._is_leaving: set[Process] = set()

    def storage_of(self, process: Process) -> Storage:
        """The folder, as a process sees it."""
        return Storage(FOLDER, WatchedDisk(self.disk, process, self))

    def leaves(self, process: Process) -> None:
        """It has trained, and deletes its backups."""
        self._is_leaving.add(process)

    def took(self, fence: int, token: str) -> None:
        """An owner's claim is made, and what others have begun is swept away."""
        if fence == self.newest_owner[0]:
            self._violated(f"there are two owners {fence}")
        if fence not in numbered(self._names(), "lease"):
            return  # it has slept: the next owner has ended, and removed the folder with this claim
        self.newest_owner = max(self.newest_owner, (fence, token))  # it may have slept meanwhile

    def renamed(self, process: Process, path: Path, target: Path) -> None:
        """Called when a process has renamed anything."""
        for new in drafts([target.name], "backup"):
            (old,) = drafts([path.name], "writing")
            if self.newest_owner[1] != old.token and self._fence_of(old.token) == -1:
                self._violated(f"{old} is published, though {self.newest_owner} has the folder")
            if new.number in self.published:
                self._violated(f"number {new.number} is used twice")
            if new.number <= max(self.published, default=0):
                self._violated(f"number {new.number} comes after {max(self.published)}")
            self.published[new.number] = old.token
            self.steps_of(new.number)
        for gone in numbered([target.name], "deleting"):
            if process not in self._is_leaving:
                newer = [n for n in self.numbers() if n > gone]
                if not any(self._is_whole(n) for n in newer):
                    self._violated(f"backup {gone} is deleted, and none that is newer is whole")
            self.certain.pop(gone, None)

    def removed(self, path: Path) -> None:
        """Called when a process has removed a file: with the last claim all begins anew.

        A process that slept through the loss of its folder wakes among these, or hardly ever.
        """
        self.world.wake(self._wake_chance)
        if numbered([path.name], "lease") and not numbered(self._names(), "lease"):
            self.newest_owner, self.published, self.certain = (0, ""), {}, {}

    def _fence_of(self, token: str) -> int:
        """-1 for a token whose owner has lost the folder to one that has swept it."""
        return 0 if token == self.newest_owner[1] else -1

    def synced(self, folder: Path) -> None:
        """Called when a process has synced the names of a folder."""
        if folder == FOLDER:
            self.certain = {number: self.steps_of(number) for number in self.numbers()}

    def numbers(self) -> list[int]:
        """Of the backups that count now."""
        return numbered(self._names(), "backup")

    def steps_of(self, number: int) -> int:
        """The steps of a backup, every byte of which is checked.

        Raises:
            Violation: if it is not whole, or not of one job.
        """
        storage = self._seen_storage()
        names = {f"worker-{r}" for r in range(storage.manifest(number).about["num_workers"])}
        contents = storage.read(number)
        parts = {n: BackupPart.from_files(n, contents) for n in {"shared", *names}}
        jobs = {
            part["callbacks" if n == "shared" else "compression"]["job"].item()
            for n, part in parts.items()
        }
        steps = {
            part["model"]["arrays"][0].item() if n == "shared" else part["metrics"][0][0].item()
            for n, part in parts.items()
        }
        if len(jobs) != 1 or len(steps) != 1:
            self._violated(f"backup {number} is of jobs {jobs}, of steps {steps}")
        return steps.pop()

    def _is_whole(self, number: int) -> bool:
        try:
            self.steps_of(number)
        except Exception:
            return False
        return True

    def resumed(self, num_steps: int, value: int, token: str) -> None:
        """A process goes on behind so many steps; `token` is that of its lease, if it has one."""
        self.world.note(f"goes on after {num_steps} steps")
        if value != hash_after(num_steps):
            self._violated(f"a process goes on after {num_steps} steps that nobody did so")
        if num_steps > self.most_steps:
            self._violated(f"a process goes on after {num_steps} steps, which never ran")
        expected = max(self.certain.items(), default=(0, 0))[1]
        if num_steps < expected and token == self.newest_owner[1]:
            self._violated(f"a process goes on after {num_steps} steps; {expected} were saved")

    def stepped(self, num_steps: int) -> None:
        """A process has done so many steps."""
        self.most_steps = max(self.most_steps, num_steps)

    def power_failed(self) -> None:
        """All that counts is whole, and all of it that was certain is there."""
        lost = self.certain.keys() - set(self.numbers())
        if lost:
            self._violated(f"backups {lost} had been published for certain")
        try:
            self.certain = {number: self.steps_of(number) for number in self.numbers()}
        except InvalidBackupError as error:
            self._violated(f"it counts after a power failure, and is not whole: {error}")
        self.published = {n: token for n, token in self.published.items() if n in self.certain}
        self.newest_owner = 0, ""

    def _seen_storage(self) -> Storage:
        """Looked at by nobody: no time passes."""
        return Storage(FOLDER, _Look(self.disk))

    def _names(self) -> list[str]:
        found = _Look(self.disk)._find(FOLDER)
        return list(found.entries) if isinstance(found, _Folder) else []

    def _violated(self, text: str) -> None:
        self.world.fail(Violation(text))


class WatchedDisk(MountedDisk):
    """Tells the observer of what counts."""

    def __init__(self, disk: SimulatedDisk, process: Process, truth: Truth):
        super().__init__(disk, process)
        self._truth = truth

    def rename(self, path: Path, target: Path) -> None:
        super().rename(path, target)
        try:
            self._truth.renamed(self._process, path, target)
        except Exception as error:
            self._world.fail(Violation(f"{target.name} was published and is not whole: {error}"))

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self._truth.synced(folder)

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        self._truth.removed(path)


class _Look(MountedDisk):
    """Looks without a process: no time passes."""

    def __init__(self, disk: SimulatedDisk):
        self._disk, self._world = disk, disk.world

    def _asks(self) -> None:
        pass


class _Root(str):
    """The folder's name in messages; knows what is of this process."""

    writer: Writer
    truth: Truth


class SimulatedProcesses:
    """Who owners are; see `held_lease.Processes`."""

    def __init__(self, process: Process, machine: str):
        self._process, self._machine = process, machine

    def this_process(self, job: str = "") -> Owner:
        process = self._process
        name = {
            "host": process.host,
            "pid": process.pid,
            "job": job or process.name,
            "since": "now",
        }
        return Owner(**name, machine=self._machine, started=str(process.pid))

    def is_this_process(self, owner: Owner) -> bool:
        return owner.pid == self._process.pid

    def has_ended(self, owner: Owner) -> bool:
        self._process.world.request()
        if owner.machine != self._machine:
            return False
        return all(p.is_over for p in self._process.world.processes if p.pid == owner.pid)


class _Training:
    """What a strategy answers to the callback: `replicas.training.Training`."""

    def __init__(self, agreement: Agreement | None):
        self._agreement = agreement

    def settle(self) -> None:
        pass

    def agreement(self) -> Agreement | None:
        return self._agreement

    def compression_of(self, optimizer: Any) -> None:
        return None


class _Call:
    """What `FitCall` is to the callback."""

    def __init__(self, training: _Training, process: Process):
        strategy = SimpleNamespace(extended=training)
        self.model = SimpleNamespace(distribute_strategy=strategy)
        self.strategy_name, self.epoch_iterator, self.has_ended = "simulated", None, False
        self.num_steps, self.hash, self.process = 0, 0, process

    def told_last(self, callback: Any) -> bool:
        return True

    def build_model(self, num_variables: int) -> None:
        pass

    def runs(self) -> bool:
        return not self.has_ended

    def runs_in(self, frame: Any) -> bool:
        return self.runs()

    def forget_start(self) -> None:
        pass

    def forget_logs(self) -> None:
        pass


class _Restoration:
    """What `snapshot.Restoration` is to the callback."""

    def __init__(self, call: _Call, found: FoundBackup, workers: Any):
        shared = found.parts["shared"]
        self.progress = TrainingProgress(**shared["progress"])
        call.num_steps, call.hash = (a.item() for a in shared["model"]["arrays"])
        done = self.progress.epoch * STEPS_PER_EPOCH + self.progress.batch
        assert done == call.num_steps, (done, call.num_steps)

    def before_training(self, position: Any) -> None:
        pass

    def in_first_epoch(self) -> None:
        pass


def _snapshot(call: _Call, position: Any, progress: TrainingProgress, workers: Any) -> dict:
    parts = {}
    job, steps = np.int64(position.job), np.array(call.num_steps)
    if workers.is_chief:
        shared = parts["shared"] = BackupPart()
        shared["num_workers"] = workers.num_workers
        shared["progress"] = {"epoch": progress.epoch, "batch": progress.batch, "logs": {}}
        shared["stop_training"] = False
        shared["model"] = {"paths": ["steps", "hash"], "arrays": [steps, np.array(call.hash)]}
        shared["callbacks"] = {"job": job}
    own = parts[f"worker-{workers.rank}"] = BackupPart()
    own["metrics"] = [[steps]]
    own["compression"] = {"job": job}
    own["random"] = {"host": _HOST, "tensorflow": None, "keras": None}
    own["input"] = {
        "taken": [],
        "goes_on": False,
        "steps_seen": call.num_steps,
        "num_batches": None,
        "has_checkpoint": None,
        "checkpoint": None,
        "random": {},
    }
    return parts


class _Position:
    """What `InputPosition` is to the callback; knows which job it is."""

    def __init__(self, job: int):
        self.job = job

    def took(self, num_batches: int) -> None:
        pass

    def steps_of_epoch(self, steps: Iterator[tuple]) -> Iterator[tuple]:
        return steps


class _Notice:
    """What `PreemptionNotice` is to the callback."""

    has_come = False

    def watch(self, is_training: Any) -> None:
        pass

    def unwatch(self) -> None:
        pass


_HOST = host_random_state()


@contextlib.contextmanager
def played_keras() -> Iterator[None]:
    """Within it the callback's Keras and TensorFlow are played."""

    def call_of(callback: Any) -> _Call:
        return callback.sim_call

    take = Lease._take

    def took(lease: Lease, *arguments: Any) -> bool:
        is_taken = take(lease, *arguments)
        if is_taken:
            lease._storage.root.truth.took(lease.fence, lease._token)
        return is_taken

    names = {
        "FitCall": SimpleNamespace(of_caller=call_of),
        "InputPosition": lambda iterator, num_workers, checks: iterator,
        "Restoration": _Restoration,
        "ranges_here": lambda model: lambda position, size: (0, size),  # the whole
        "take_snapshot": _snapshot,
        "writer_for": lambda root: root.writer,
    }
    with contextlib.ExitStack() as stack:
        for name, played in names.items():
            stack.enter_context(mock.patch.object(callback_module, name, played))
        stack.enter_context(mock.patch("tfparallel.coordination.writer._yield_processors", int))
        stack.enter_context(mock.patch("tfparallel.callbacks.backup.held_lease._leases", {}))
        stack.enter_context(mock.patch.object(Lease, "_take", took))
        numbers = itertools.count(1)
        token = mock.patch("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
        stack.enter_context(token)
        yield


class Training:
    """One process that trains.

    Args:
        process: it.
        truth: the observer.
        options: of `BackupAndRestore`.
        agreement: with other workers.
        meet: makes all workers do a step together.
        term_chance: of a SIGTERM, for each step.
        machine: a name for where processes can be asked whether others have ended.
        job: what its backups say they are of; one process is a job of its own.
    """

    def __init__(
        self,
        process: Process,
        truth: Truth,
        options: dict[str, Any],
        machine: str,
        agreement: Agreement | None = None,
        meet: Any = None,
        term_chance: float = 0.0,
        job: int | None = None,
    ):
        self.process, self.truth, self._meet, self._term_chance = process, truth, meet, term_chance
        callback = self.callback = BackupAndRestore(FOLDER, **options)
        storage = callback._storage = truth.storage_of(process)
        root = storage.root = _Root(f"{FOLDER} of {process.name} {process.pid}")
        root.writer, root.truth = Writer(process.machine), truth
        callback._machine = process.machine
        callback._processes = SimulatedProcesses(process, machine)
        callback._notice = _Notice()
        self.call = callback.sim_call = _Call(_Training(agreement), process)
        self.call.epoch_iterator = _Position(process.pid if job is None else job)
        self.options = options

    def fit(self) -> None:
        """Trains to the end.

        Raises:
            SystemExit: after SIGTERM.
            BackupError: as the callback does.
        """
        callback, call, truth = self.callback, self.call, self.truth
        try:
            callback.on_train_begin()
            token = callback._lease._token if callback._lease is not None else ""
            truth.resumed(call.num_steps, call.hash, token)
            first = callback._progress
            for epoch in range(first.epoch, EPOCHS):
                self._epoch(epoch, first.batch if epoch == first.epoch else 0)
            if self.options.get("delete_on_success", True):
                truth.leaves(self.process)
            callback.on_train_end()
        except LeaseError as error:
            if not _NAMED.search(str(error)):
                truth.world.fail(Violation(f"an error that names nobody: {error}"))
            raise
        finally:
            call.has_ended = True

    def _epoch(self, epoch: int, begin: int) -> None:
        callback, call = self.callback, self.call
        callback.on_epoch_begin(epoch)
        for batch in range(begin, STEPS_PER_EPOCH):
            self.process.world.sleep(0.02)
            if self._meet is not None:
                self._meet(call.num_steps)
            call.hash = next_hash(call.hash, call.num_steps)
            call.num_steps += 1
            self.truth.stepped(call.num_steps)
            if self._term_chance and self.process.world.choices.rarely(self._term_chance):
                callback._notice.has_come = True
            callback.on_train_batch_end(batch)
        callback.on_epoch_end(epoch)
