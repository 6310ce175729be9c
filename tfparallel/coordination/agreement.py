"""Workers tell one another what they are about to do, so that a disagreement is an error at once.

Collectives match by order: a worker that has one variable or one batch more than its peers waits
for ever. Every such step is announced first in a store that they share, in one sequence for all
kinds of steps.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence

from tfparallel.coordination.machine import THIS_MACHINE, Machine
from tfparallel.coordination.patience import LONGEST_LOOK_S, Wait, WaitedTooLong
from tfparallel.coordination.store import Store
from tfparallel.coordination.waited import waiting_for_others
from tfparallel.coordination.waiting import look

_STEPS_IN_FOLDER = 16  # which are deleted together: a request is a round trip of the network
_PATIENCE_S = LONGEST_LOOK_S / 2  # until it is asked whether a silent peer is alive


class DisagreementError(RuntimeError):
    """Workers that should do the same are about to do different things."""


class PeerEndedError(DisagreementError):
    """A worker has ended that the others wait for."""


class Agreement:
    """One worker's side of the announcements.

    Args:
        store: what the workers share.
        name: the same on all workers, different for each sequence of announcements.
        rank, num_workers: this worker's position, and how many there are.
        timeout_s: how long to wait for a peer that lives but says nothing; None waits for ever.
        slow_timeout_s: the same, in sequences of their own, in which peers write files.
        machine: what it runs on.
        ranks: those that announce, in their order, where they are not all of a job.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        num_workers: int,
        timeout_s: float | None = 1800.0,
        slow_timeout_s: float | None = 14_400.0,
        machine: Machine = THIS_MACHINE,
        ranks: Sequence[int] | None = None,
    ):
        self.store, self.name = store, name
        self.rank, self.num_workers = rank, num_workers
        self.ranks = tuple(range(num_workers) if ranks is None else ranks)
        self._timeout_s, self._slow_timeout_s = timeout_s, slow_timeout_s
        self._step, self.machine = 0, machine
        self.numbers = itertools.count()  # for the names of sequences, the same on all workers

    def sequence(self, name: str) -> "Agreement":
        """Announcements of their own, for what has no fixed order with the others."""
        own, slow_s = f"{self.name}/{name}", self._slow_timeout_s
        place = (self.rank, self.num_workers)
        return Agreement(self.store, own, *place, slow_s, slow_s, self.machine, self.ranks)

    def among(self, ranks: Sequence[int]) -> "Agreement":
        """Announcements of some of the ranks, this one among them, who keep their numbers."""
        own, waits = f"{self.name}/among {ranks[0]}", (self._timeout_s, self._slow_timeout_s)
        return Agreement(self.store, own, self.rank, self.num_workers, *waits, self.machine, ranks)

    def exchange(self, kind: str, value: object) -> list:
        """Announces `value`; returns what every worker announced, in the order of `ranks`.

        Args:
            kind: what the worker is about to do, for example "create a variable".
            value: anything JSON can hold.

        Raises:
            DisagreementError: if a peer is about to do something of another kind, or says nothing.
        """
        self._step += 1
        own = json.dumps([kind, value])
        self._put(own)
        with waiting_for_others(self.machine.now_s):
            texts = [own if r == self.rank else self._get(r, kind) for r in self.ranks]
        announced = [json.loads(text) for text in texts]
        if any(their_kind != kind for their_kind, _ in announced):
            raise DisagreementError(
                "All workers must do the same, in the same order. Received: "
                + self._by_rank([f"to {k} ({_short(v)})" for k, v in announced])
            )
        return [value for _, value in announced]

    def require_equal(self, kind: str, value: object, beside: object = None) -> bool:
        """Announces `value` and refuses to go on unless all workers announced the same.

        Args:
            beside: what travels with it and may differ.

        Returns:
            Whether all workers have the same `beside`.

        Raises:
            DisagreementError: naming what each rank announced.
        """
        announced, besides = zip(*self.exchange(kind, [value, beside]), strict=True)
        if any(other != announced[0] for other in announced):
            raise DisagreementError(
                f"All workers must agree when they {kind}. Received: "
                + self._by_rank([_short(v) for v in announced])
            )
        return all(other == besides[0] for other in besides)

    def value_of(self, rank: int, key: str, kind: str) -> str:
        """What worker `rank` stores under `key`, waiting for it while it lives.

        Args:
            rank: the worker.
            key: of the store.
            kind: what that worker is expected to do, for messages.

        Raises:
            DisagreementError: if it has died, or is silent for too long.
        """
        speaker, option = f"rank {self.rank}", "A longer stall_s (of backups: write_s)"
        wait = Wait(speaker, kind, self._timeout_s, self.machine.now_s(), option)
        whom = ""
        while True:
            try:
                return self.store.get(key, _PATIENCE_S)
            except TimeoutError:
                self._require_alive(rank, kind)
            whom = whom or f"rank {rank} of {self.num_workers} ({self.store.describe(rank)})"
            try:
                look(wait, whom, self.machine)
            except WaitedTooLong as error:
                raise DisagreementError(str(error)) from error

    def _require_alive(self, rank: int, kind: str) -> None:
        try:
            self.store.require_alive(rank)
        except ConnectionError as error:
            raise PeerEndedError(
                f"Expected rank {rank} of {self.num_workers} ({self.store.describe(rank)}) to "
                f"{kind}. {error} (Rank {self.rank} is speaking.)"
            ) from error

    def _folder(self, rank: int, number: int) -> str:
        return f"tfparallel/{self.name}/told/{rank}/{number}"

    def _key(self, rank: int) -> str:
        number, place = divmod(self._step, _STEPS_IN_FOLDER)
        return f"{self._folder(rank, number)}/{place}"

    def _put(self, message: str) -> None:
        self.store.put(self._key(self.rank), message)
        number, place = divmod(self._step, _STEPS_IN_FOLDER)
        if number > 1 and place == 0:  # every peer is at most one step behind
            self.store.delete(self._folder(self.rank, number - 2))

    def _get(self, rank: int, kind: str) -> str:
        return self.value_of(rank, self._key(rank), kind)

    def _by_rank(self, texts: list[str]) -> str:
        texts = [f"rank {rank}: {text}" for rank, text in zip(self.ranks, texts, strict=True)]
        return f"{'; '.join(texts)}. (Rank {self.rank} is speaking.)"


def fingerprint(value: object) -> str:
    """A short text that differs where `value` (anything JSON can hold) differs."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 400 else f"{text[:400]}… ({fingerprint(value)})"
