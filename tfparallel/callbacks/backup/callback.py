"""The callback that backs a training up and resumes it exactly where it stopped."""

import datetime
import functools
import math
import os
import signal
from collections.abc import Callable, Iterator
from typing import Literal

import keras
import tensorflow as tf

from tfparallel.callbacks.backup import owner
from tfparallel.callbacks.backup.commit import write_backup
from tfparallel.callbacks.backup.fit_call import FitCall
from tfparallel.callbacks.backup.held_lease import Lease, Processes
from tfparallel.callbacks.backup.input_position import InputPosition
from tfparallel.callbacks.backup.model_state import ranges_here
from tfparallel.callbacks.backup.search import FoundBackup, find_backup
from tfparallel.callbacks.backup.snapshot import Restoration, TrainingProgress, take_snapshot
from tfparallel.callbacks.backup.step_agreement import StepAgreement
from tfparallel.callbacks.backup.storage import BackupError, LeaseError, Storage
from tfparallel.callbacks.backup.workers import Workers, exchange
from tfparallel.callbacks.preemption import EXIT_STATUS, PreemptionNotice
from tfparallel.checked_types import checks_types
from tfparallel.coordination.machine import THIS_MACHINE, Machine
from tfparallel.coordination.writer import Writer, writer_for
from tfparallel.internals.keras_epochs import hook_steps
from tfparallel.internals.keras_trainer import fit_that_tells
from tfparallel.version import __version__

_SHORTEST_LEASE_S = 1.0


@checks_types
class BackupAndRestore(keras.callbacks.Callback):
    """Saves the state of `Model.fit` and resumes it: a run that was killed ends as if it was not.

    Drop-in for `keras.callbacks.BackupAndRestore`. The model need not be built before `fit`. Under
    `MultiWorkerMirroredStrategy` every worker passes the callback, with a folder that all see.

    Restored are the weights, the optimizer, metrics inside the epoch, the seeds of layers, the
    state of Python's, NumPy's, TensorFlow's and Keras's global generators, callbacks (the user's
    own through `get_state()` and `set_state(state)`), epoch and batch, and the position in the
    data.

    Args:
        backup_dir: a folder for the backups of this training alone; created with mode 0700.
        save_freq: "epoch"; or a number of batches, counted over epochs; or a `timedelta`, at the
            end of the first batch after it; or False, for `save_before_preemption` only.
        keep: how many backups stay, at least 1. The default 2 survives the loss of one.
        save_before_preemption: after SIGTERM, finish the step, save, and exit with status 143.
        delete_on_success: delete the backups when `fit` ends, so that the next `fit` starts anew.
        on_error: what a backup that cannot be written does (a full disk, no permission): "raise"
            ends the training, "warn" lets it go on. The backups before it stay as they were.
            A backup that cannot be restored always raises.
        asynchronous: write on another thread while training goes on. At most one backup is being
            written; the next one waits for it, and its error is raised at the next batch.
        lease_s: the folder is this training's while it runs. After so many seconds without a sign
            of life from another machine, a training that is started there takes the folder over;
            on the same machine it does so as soon as the process has ended.
        check_data: a resumed training must begin with the batches that its backup tells of (by a
            hash); with False it goes on with whatever data there are.

    Raises:
        ValueError: for arguments out of range.
        LeaseError: a `BackupError`, by `fit`, if another training has the folder.
        BackupError: by `fit`, if there are backups but none can be restored, or, with
            `on_error="raise"`, if one cannot be written.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike,
        save_freq: str | int | Literal[False] | datetime.timedelta = "epoch",
        keep: int = 2,
        save_before_preemption: bool = True,
        delete_on_success: bool = True,
        on_error: str = "raise",
        asynchronous: bool = True,
        lease_s: float = 60.0,
        check_data: bool = True,
    ):
        super().__init__()
        _check(backup_dir, save_freq, keep, on_error, lease_s)
        self._storage = Storage(backup_dir)
        self._lease_s = float(lease_s)
        self._machine: Machine = THIS_MACHINE
        self._processes: Processes = owner
        self._lease: Lease | None = None
        self._save_freq = save_freq
        self._keep = keep
        self._delete_on_success = delete_on_success
        self._raises, self._checks_data = on_error == "raise", check_data
        self._asynchronous = asynchronous
        self._notice = PreemptionNotice() if save_before_preemption else None

    # ---- beginning and end -----------------------------------------------------------------------

    def set_model(self, model: keras.Model) -> None:
        """See `keras.callbacks.Callback`.

        Of all that is put around the steps of this `fit`, what gives them batches that were read
        ahead comes first: so a callback that measures the steps sees these, too.
        """
        super().set_model(model)
        self._around_steps: Callable[[Iterator], Iterator] = iter
        fit = fit_that_tells(model)
        if fit is not None:
            hook_steps(fit.epoch_iterator, lambda steps: self._around_steps(steps))

    def on_train_begin(self, logs: object = None) -> None:
        """Restores the newest backup, if there is one; moves this callback to the end of the list.

        Told last, it sees what every other callback has made of a step.
        """
        call = FitCall.of_caller(self)
        if not call.told_last(self):
            return
        self._call = call
        self._workers = Workers(call.model.distribute_strategy)
        self._agreement = self._workers.agreement("write")
        self._agreement_of_epochs = self._workers.agreement("epoch")
        self._writer = writer_for(self._storage.root)
        self._in_writer(self._writer.wait)
        self._lease = self._take_folder()
        self._progress, self._restoration = TrainingProgress(), None
        self._unsaved_batches, self._last_save = 0, self._machine.now_s()
        self._steps = StepAgreement(self._workers)
        found = self._find_backup()
        if found is not None:
            call.build_model(len(found.parts["shared"]["model"]["paths"]))
        position = (call.epoch_iterator, self._workers.num_workers, self._checks_data)
        self._position = InputPosition(*position)
        self._around_steps = self._position.steps_of_epoch
        if found is not None:
            self._restoration = Restoration(call, found, self._workers)
            self._restoration.before_training(self._position)
            self._progress = self._restoration.progress
            tf.get_logger().info(
                "Resumed from %s at epoch %d, batch %d.",
                *(self._storage.root, self._progress.epoch, self._progress.batch),
            )
        if self._notice is not None:
            self._notice.watch(call.runs_in)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """In the first epoch, puts back what its beginning has changed."""
        self._progress.epoch = epoch
        self._call.forget_start()
        if self._restoration is not None:
            self._restoration.in_first_epoch()
            self._restoration = None

    def on_train_end(self, logs: object = None) -> None:
        """Waits for the last backup, then deletes all of them if asked to.

        After SIGTERM they stay: whatever follows `fit` is done by the run that is started again.
        """
        if self._is_exit_asked("end a training"):
            self._save_and_exit()
        self._stop_watching()
        if self._notice is not None and self._notice.has_come:  # in between
            signal.raise_signal(signal.SIGTERM)
        self._call.forget_start()
        self._in_writer(self._writer.wait)
        if self._lease is not None and self._lease.fence:
            self._in_writer(self._leave_folder)

    def _leave_folder(self) -> None:
        """Gives the folder back, empty if the training is to leave nothing."""
        assert self._lease is not None
        if self._delete_on_success:
            self._storage.delete_all(check=self._lease.require)
        self._lease.release(forget=not self._storage.numbers())
        self._storage.delete_root()

    def _take_folder(self) -> Lease | None:
        """The chief's lease, once all workers have written something in the folder.

        Where one cannot, the training ends here, not at its first save.
        """
        lease, error, problem = None, None, None
        if self._workers.is_chief:
            is_needed = functools.partial(_is_needed, self._call, self._writer)
            place = (self._machine, self._processes)
            lease = Lease(self._storage, self._lease_s, is_needed, "", *place)
            try:
                lease.acquire()
            except LeaseError as in_use:
                error = in_use
            except OSError as failure:
                problem = failure
        told = exchange(self._workers.agreement("lease"), "take the folder", error and str(error))
        if told[0] is not None:
            raise LeaseError(told[0]) from error
        self._in_writer(functools.partial(self._probe_folder, problem))
        return lease

    def _find_backup(self) -> FoundBackup | None:
        try:
            return find_backup(self._storage, self._workers, ranges_here(self._call.model))
        except BackupError:
            if self._lease is not None and self._lease.fence:
                self._lease.require()  # who has lost the folder finds its files gone: say why
            raise

    def _probe_folder(self, problem: OSError | None) -> None:
        """Writes a small file in the folder, on every worker but the one that has the lease.

        Args:
            problem: why the lease could not be written.

        Raises:
            OSError: on all workers, naming those that cannot write there.
        """
        if not self._workers.is_chief:
            try:
                self._storage.files.probe()
            except OSError as failure:
                problem = failure
        rank = self._workers.rank
        text = problem and f"rank {rank} cannot write in {self._storage.root} ({problem})"
        told = exchange(self._workers.agreement("probe"), "write in the folder", text)
        if any(told):
            raise OSError(
                "Expected a folder that all workers can write in. Received: "
                f"{'; '.join(each for each in told if each)}."
            )

    # ---- saving ----------------------------------------------------------------------------------

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Saves if it is time to."""
        steps = batch + 1 - self._progress.batch
        self._position.took(steps)
        self._progress.batch = batch + 1
        self._progress.logs = keras.tree.map_structure(_as_number, logs or {})
        self._unsaved_batches += steps
        self._in_writer(self._raise_errors)
        due = self._steps.at_end_of_step(self._wanted())
        if "exit" in due:
            self._save_and_exit()
        elif "save" in due or self._is_due():
            self._save()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Saves if it is time to."""
        self._call.forget_logs()
        self._progress = TrainingProgress(epoch + 1)
        self._in_writer(self._raise_errors)
        if self._is_exit_asked("validate"):
            self._save_and_exit()
        elif self._save_freq == "epoch":
            self._save()

    def _wanted(self) -> set[str]:
        """What this worker alone can know: that SIGTERM has come, that it is time to save."""
        wanted = set()
        if self._notice is not None and self._notice.has_come:
            wanted.add("exit")
        if isinstance(self._save_freq, datetime.timedelta) and self._workers.is_chief:
            is_time = self._machine.now_s() - self._last_save >= self._save_freq.total_seconds()
            wanted |= {"save"} if is_time else set()
        return wanted

    def _raise_errors(self) -> None:
        """Raises what has failed on other threads."""
        if self._lease is not None:
            self._lease.raise_if_lost()
        self._writer.raise_error()

    def _is_exit_asked(self, kind: str) -> bool:
        """Whether SIGTERM has come to any worker since the last step: while it validated, say."""
        has_come = self._notice is not None and self._notice.has_come
        return any(exchange(self._agreement_of_epochs, kind, has_come))

    def _is_due(self) -> bool:
        """Whether all workers know that it is time to save, because they count the batches."""
        if isinstance(self._save_freq, int) and self._save_freq is not False:
            return self._unsaved_batches >= self._save_freq
        return False

    def _save(self) -> None:
        parts = take_snapshot(self._call, self._position, self._progress, self._workers)
        about = self._about()

        def write() -> None:
            rank = self._workers.rank
            arguments = (self._storage, self._agreement, rank, parts, about, self._keep)
            write_backup(*arguments, self._lease)

        self._unsaved_batches, self._last_save = 0, self._machine.now_s()
        self._in_writer(lambda: self._writer.submit(write))
        if not self._asynchronous:
            self._in_writer(self._writer.wait)

    def _save_and_exit(self) -> None:
        self._save()
        self._in_writer(self._writer.wait)
        self._stop_watching()
        if self._lease is not None:
            self._lease.release()
        raise SystemExit(EXIT_STATUS)

    def _stop_watching(self) -> None:
        self._steps.end()
        if self._notice is not None:
            self._notice.unwatch()

    def _in_writer(self, action: Callable[[], object]) -> None:
        """Runs `action`, which may raise what the writing of a backup raised."""
        try:
            action()
        except LeaseError:
            raise  # two trainings in one folder are no matter of taste
        except Exception as error:
            if self._raises:
                raise BackupError(f"A backup could not be written: {error}") from error
            tf.get_logger().error("Training goes on without a new backup. %s", error)

    def _about(self) -> dict[str, object]:
        return {
            "epoch": self._progress.epoch,
            "batch": self._progress.batch,
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "strategy": self._call.strategy_name,
            "num_workers": self._workers.num_workers,
            "fence": 0 if self._lease is None else self._lease.fence,
            "tfparallel": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        }


def _is_needed(call: FitCall, writer: Writer) -> bool:
    """Whether a training runs, or its last backup is being written."""
    return writer.is_busy or call.runs()


def _as_number(value: tf.Tensor) -> object:
    return value.numpy() if tf.is_tensor(value) else value


def _check(
    backup_dir: str | os.PathLike,
    save_freq: object,
    keep: object,
    on_error: object,
    lease_s: object,
) -> None:
    if not os.fspath(backup_dir):
        raise ValueError("`backup_dir` must name a folder. Received: an empty string.")
    is_number = isinstance(save_freq, int) and save_freq >= 0 and save_freq is not True
    is_time = isinstance(save_freq, datetime.timedelta) and save_freq > datetime.timedelta(0)
    if not (save_freq == "epoch" or save_freq is False or is_time or (is_number and save_freq)):
        raise ValueError(
            "`save_freq` must be 'epoch', a number of batches, a timedelta, or False. "
            f"Received: {save_freq!r}."
        )
    if not (isinstance(keep, int) and keep >= 1):
        raise ValueError(f"`keep` must be a number of backups, at least 1. Received: {keep!r}.")
    if on_error not in ("raise", "warn"):
        raise ValueError(f"`on_error` must be 'raise' or 'warn'. Received: {on_error!r}.")
    if not (isinstance(lease_s, (int, float)) and _SHORTEST_LEASE_S <= lease_s < math.inf):
        raise ValueError(
            f"`lease_s` must be a number of seconds, at least {_SHORTEST_LEASE_S:g}: a sixth of it "
            f"passes between two signs of life. Received: {lease_s!r}."
        )
