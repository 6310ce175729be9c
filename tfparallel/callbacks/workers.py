"""The workers that make one backup together.

One worker is the common case: it agrees with itself.
"""

import itertools
from typing import Any

import tensorflow as tf

from tfparallel.communication.agreement import Agreement, DisagreementError
from tfparallel.tf_internals import context

_PATIENCE_MS = 10_000  # until it is asked whether a silent peer is alive
_numbers = itertools.count()  # of the trainings of this process, the same on all workers


class Workers:
    """This worker and its peers, in one training.

    Attributes:
        rank, num_workers: this worker's position, and how many there are.
        name: of the training, the same on all workers.
    """

    def __init__(self, strategy: Any):
        extended = strategy.extended
        self._strategy = strategy
        self.num_workers: int = getattr(extended, "_num_workers", 1)
        self.rank: int = extended._id_in_cluster if self.num_workers > 1 else 0
        own = getattr(extended, "_agreement", None)
        self.name = f"{own._name}/backup/{next(_numbers)}" if own is not None else ""

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes what all have in common."""
        return self.rank == 0

    def agreement(self, purpose: str) -> Agreement | None:
        """A sequence of announcements of its own for a thread, or None for one worker."""
        if self.num_workers == 1:
            return None
        return _PatientAgreement(f"{self.name}/{purpose}", self)

    def value_of(self, rank: int, key: str, kind: str) -> str:
        """What worker `rank` stores under `key` of the cluster, waiting for it while it lives.

        Args:
            rank: the worker.
            key: of the cluster's key-value store.
            kind: what the worker is about to do, for messages.

        Raises:
            DisagreementError: if it has died.
        """
        while True:
            try:
                return context.context().get_config_key_value(key, timeout_in_ms=_PATIENCE_MS)
            except tf.errors.DeadlineExceededError:
                self._check_is_alive(rank, kind)
                message = "[rank %d] waits for rank %d of %d to %s."
                tf.get_logger().warning(message, self.rank, rank, self.num_workers, kind)

    def _check_is_alive(self, rank: int, kind: str) -> None:
        cluster = self._strategy.cluster_resolver.cluster_spec()
        jobs = [job for job in ("chief", "worker") if job in cluster.jobs]
        tasks = [(job, task) for job in jobs for task in cluster.task_indices(job)]
        job, task = tasks[rank]
        try:
            context.context().check_collective_ops_peer_health(
                f"/job:{job}/replica:0/task:{task}", timeout_in_ms=_PATIENCE_MS
            )
        except tf.errors.OpError as error:
            raise DisagreementError(
                f"Expected rank {rank} of {self.num_workers} (/job:{job}/task:{task}) to {kind}. "
                f"It has ended, its own log says why: {error.message} (Rank {self.rank} is "
                "speaking.)"
            ) from error


class _PatientAgreement(Agreement):
    """Announcements that may take as long as writing a large file, but not longer than its writer.

    Args:
        name: the same on all workers, different for each sequence.
        workers: this worker and its peers.
    """

    def __init__(self, name: str, workers: Workers):
        super().__init__(name, workers.rank, workers.num_workers)
        self._workers = workers

    def _get(self, rank: int, kind: str) -> str:
        return self._workers.value_of(rank, self._key(rank, self._step), kind)


def exchange(agreement: Agreement | None, kind: str, value: Any) -> list:
    """What every worker announced, by rank.

    Raises:
        DisagreementError: if a peer has died, or is about to do something else.
    """
    return [value] if agreement is None else agreement.exchange(kind, value)
