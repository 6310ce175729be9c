"""Workers tell one another what they are about to do, so that a disagreement is an error at once.

Collectives match by order: a worker that has one variable or one batch more than its peers waits
for ever. Every such step is announced first in the cluster's key-value store (TensorFlow's
coordination service), in one sequence for all kinds of steps.
"""

import hashlib
import json
import time
from typing import Any

import tensorflow as tf

from tfparallel.tf_internals import context


class DisagreementError(RuntimeError):
    """Workers that should do the same are about to do different things."""


class Agreement:
    """One worker's side of the announcements.

    Args:
        name: the same on all workers, different for each strategy of a process.
        rank, num_workers: this worker's position, and how many there are.
        timeout_s: how long to wait for a peer's announcement before giving up.
    """

    def __init__(self, name: str, rank: int, num_workers: int, timeout_s: float = 600.0):
        self._name, self._rank, self._num_workers = name, rank, num_workers
        self._timeout_s = timeout_s
        self._step = 0

    def exchange(self, kind: str, value: Any) -> list:
        """Announces `value`; returns what every worker announced, by rank.

        Args:
            kind: what the worker is about to do, for example "create a variable".
            value: anything JSON can hold.

        Raises:
            DisagreementError: if a peer is about to do something of another kind, or says nothing.
        """
        self._step += 1
        self._put(json.dumps([kind, value]))
        announced = [json.loads(self._get(rank, kind)) for rank in range(self._num_workers)]
        if any(their_kind != kind for their_kind, _ in announced):
            raise DisagreementError(
                "All workers must do the same, in the same order. Received: "
                + self._by_rank([f"to {k} ({_short(v)})" for k, v in announced])
            )
        return [value for _, value in announced]

    def require_equal(self, kind: str, value: Any) -> None:
        """Announces `value` and refuses to go on unless all workers announced the same.

        Raises:
            DisagreementError: naming what each rank announced.
        """
        announced = self.exchange(kind, value)
        if any(other != announced[0] for other in announced):
            raise DisagreementError(
                f"All workers must agree when they {kind}. Received: "
                + self._by_rank([_short(v) for v in announced])
            )

    def _key(self, rank: int, step: int) -> str:
        return f"tfparallel/{self._name}/{step}/{rank}"

    def _put(self, message: str) -> None:
        with tf.init_scope():
            context.context().set_config_key_value(self._key(self._rank, self._step), message)
            if self._step > 2:  # every peer is at most one step behind
                context.context().delete_config_key_value(self._key(self._rank, self._step - 2))

    def _get(self, rank: int, kind: str) -> str:
        deadline = time.monotonic() + self._timeout_s
        with tf.init_scope():
            while True:
                try:
                    return context.context().get_config_key_value(
                        self._key(rank, self._step), timeout_in_ms=10_000
                    )
                except tf.errors.DeadlineExceededError:
                    waited = self._timeout_s - (deadline - time.monotonic())
                    message = (
                        f"[rank {self._rank}] waits for rank {rank} of {self._num_workers} to "
                        f"{kind}, for {waited:.0f} s"
                    )
                    if time.monotonic() > deadline:
                        raise DisagreementError(f"{message}: gave up.") from None
                    tf.get_logger().warning("%s.", message)

    def _by_rank(self, texts: list[str]) -> str:
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(texts)]
        return f"{'; '.join(texts)}. (Rank {self._rank} is speaking.)"


def fingerprint(value: Any) -> str:
    """A short text that differs where `value` (anything JSON can hold) differs."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 400 else f"{text[:400]}… ({fingerprint(value)})"
