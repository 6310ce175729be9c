"""All that decides how a training goes on, as two parts: what workers share, and what is their own.

part       written by     holds
---------  -------------  ----------------------------------------------------------------
shared     the chief      epoch and batch, weights, seeds, optimizer, callbacks
worker-R   worker R       its replicas' terms of the metrics, its random states, its input, what its
                          gradient compression remembers
shards-R   worker R       where workers hold weights and slots in shards: its own
"""

import dataclasses
from typing import Any

import tensorflow as tf

from tfparallel.callbacks.backup.callback_states import callback_states, set_callback_states
from tfparallel.callbacks.backup.fit_call import FitCall
from tfparallel.callbacks.backup.input_position import InputPosition
from tfparallel.callbacks.backup.model_state import (
    is_read_together,
    mirrored_state,
    num_terms,
    replica_state,
    set_mirrored_state,
    set_replica_state,
    shards_here,
    with_one_term,
)
from tfparallel.callbacks.backup.part import BackupPart
from tfparallel.callbacks.backup.search import FoundBackup
from tfparallel.callbacks.backup.storage import BackupError
from tfparallel.callbacks.backup.workers import Workers
from tfparallel.replicas.compression_state import compression_state, set_compression_state
from tfparallel.replicas.random_states import random_state, set_random_state
from tfparallel.replicas.training import training_of


@dataclasses.dataclass
class TrainingProgress:
    """How far a training has come.

    Attributes:
        epoch: the one that is running or comes next, from 0.
        batch: its steps that are done.
        logs: of its last step.
    """

    epoch: int = 0
    batch: int = 0
    logs: dict[str, float] = dataclasses.field(default_factory=dict)


def take_snapshot(
    call: FitCall, position: InputPosition, progress: TrainingProgress, workers: Workers
) -> dict[str, BackupPart]:
    """Copies the state of a training; returns the parts that this worker writes, by name."""
    # Where steps run behind the caller's back, those that were handed out are waited for.
    training_of(call.model.distribute_strategy).settle()
    call.tell_what_is_not_saved()
    parts = {}
    model_state = {}
    if workers.is_chief or is_read_together(call.model):
        model_state = mirrored_state(call.model)
    if workers.is_chief:
        shared = parts["shared"] = BackupPart()
        shared["num_workers"] = workers.num_workers
        shared["progress"] = dataclasses.asdict(progress)
        shared["stop_training"] = bool(call.model.stop_training)
        shared["model"] = model_state
        shared["callbacks"] = callback_states(call.callbacks.callbacks)
    own = parts[f"worker-{workers.rank}"] = BackupPart()
    own["metrics"] = replica_state(call.model)
    own["compression"] = compression_state(call.model)
    own["random"] = random_state()
    reads_on = progress.epoch < call.epochs and not call.model.stop_training
    own["input"] = position.state(progress.batch > 0, reads_on)
    shards = shards_here(call.model)
    if shards:
        part = parts[f"shards-{workers.rank}"] = BackupPart()
        part["numbers"] = shards
    return parts


class Restoration:
    """Puts a training back to where a backup was made.

    Some of it has to wait: `fit` begins every epoch, also one that was half done, by resetting the
    metrics and telling all callbacks. So the state is put back before, and for an epoch that was
    half done once more after that.

    Args:
        call: the call of `fit` to resume.
        found: the backup.
        workers: this worker and its peers.

    Raises:
        BackupError: if it is the backup of another model.
    """

    def __init__(self, call: FitCall, found: FoundBackup, workers: Workers):
        self._call, self._shards, parts = call, found.shards, found.parts
        self._shared = parts["shared"]
        self.progress = TrainingProgress(**self._shared["progress"])
        self._is_stopped = self._shared["stop_training"]
        own = [part for name, part in parts.items() if name != "shared"]
        self._own = own[workers.rank] if workers.rank < len(own) else own[0]
        self._metrics = self._metrics_for(own, workers)
        self._num_workers = workers.num_workers
        self._compression = [part["compression"] for part in own]
        try:
            self._set_compression_state()
        except ValueError as error:
            raise BackupError(
                f"A backup restores a training as it was. {error} Use another backup_dir, or the "
                "compression of the backup."
            ) from error

    def _set_compression_state(self) -> None:
        set_compression_state(self._call.model, self._compression, self._num_workers)

    def _metrics_for(self, own: list[BackupPart], workers: Workers) -> list:
        metrics = [part["metrics"] for part in own]
        num_replicas = num_terms(replica_state(self._call.model))
        saved_by = self._shared["num_workers"]
        if workers.num_workers == saved_by and num_replicas == num_terms(metrics[0]):
            return metrics[0]
        tf.get_logger().warning(
            "The backup is of %d workers with %d replicas each, this training of %d with %d. "
            "Weights, optimizer, callbacks, metrics, epoch and batch are carried over. Not carried "
            "over: random numbers that differ by replica, and how sums over replicas round.",
            *(saved_by, num_terms(metrics[0]), workers.num_workers, num_replicas),
        )
        # Of as many workers each has read its own part alone, and its sum stays with it.
        has_sum = workers.is_chief or workers.num_workers == saved_by
        return with_one_term(metrics, num_replicas, has_sum)

    def before_training(self, position: InputPosition) -> None:
        """Puts everything back, and tells `fit` where to begin."""
        call, progress = self._call, self.progress
        position.resume(self._own_input())
        self._put_back()
        if progress.batch > 0:
            call.start_at(progress.epoch)
            steps_seen = self._own["input"]["steps_seen"]
            position.leave_out_steps(progress.batch)
            call.leave_out_steps(progress.batch, steps_seen, self._is_stopped)
            call.keep_logs(progress.logs)
        else:
            call.start_at(call.epochs if self._is_stopped else progress.epoch)

    def _own_input(self) -> dict[str, Any]:
        """This worker's position; of another number of workers, each may have other batches."""
        is_own = self._shared["num_workers"] == self._num_workers
        return self._own["input"] | ({} if is_own else {"next_batches": None})

    def in_first_epoch(self) -> None:
        """Puts back what the beginning of the epoch has changed."""
        if self.progress.batch > 0:
            self._put_back()
            self._call.model.stop_training = self._is_stopped

    def _put_back(self) -> None:
        call = self._call
        set_mirrored_state(call.model, self._shared["model"], self._shards)
        set_replica_state(call.model, self._metrics)
        self._set_compression_state()  # after the weights: in a round, workers have their own
        unknown = set_callback_states(call.callbacks.callbacks, self._shared["callbacks"])
        if unknown:
            tf.get_logger().warning(
                "The callbacks are not those of the backup. Not carried over: %s.",
                ", ".join(unknown),
            )
        set_random_state(self._own["random"], call.model.distribute_strategy)
