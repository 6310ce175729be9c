"""The lease that this process has, or wants, on a folder of backups: what `lease.py` decides, done.

A thread says every sixth of `lease_s` that the owner lives. It ends the lease when the training has
ended, in whatever way: an error in `fit` tells nobody.
"""

import atexit
import dataclasses
import errno
import logging
import secrets
from collections.abc import Callable
from typing import Protocol

from tfparallel.callbacks.backup import owner as processes_of_this_machine
from tfparallel.callbacks.backup.backup_names import Draft
from tfparallel.callbacks.backup.lease import Claim, Contender, owns
from tfparallel.callbacks.backup.schema import Owner
from tfparallel.callbacks.backup.storage import LeaseError, Storage
from tfparallel.coordination.machine import THIS_MACHINE, Machine

BEATS = 6  # heartbeats in the time after which an owner without one is taken for dead
_PATIENCE = 1.25  # of that time: a contender waits longer than it takes to know that one is dead
_POLLS = 20  # looks in that time
_LOOKS = 4  # at a claim that seems to be none

_logger = logging.getLogger("tensorflow")


class Processes(Protocol):
    """Who owners are; the module `owner` is one."""

    def this_process(self, job: str = "") -> Owner:
        """The process that asks, of a job of this name."""

    def is_this_process(self, owner: Owner) -> bool:
        """Whether `owner` is the process that asks."""

    def has_ended(self, owner: Owner) -> bool:
        """Whether `owner` is known to have ended: False for what runs elsewhere."""


class Lease:
    """The right to publish and to delete backups in one folder; of one training at a time.

    Args:
        storage: the folder.
        lease_s: how long an owner of another machine may be silent before it is taken for dead.
        is_needed: whether the training still runs, or a backup of it is being written.
        job: its name, in the messages of others; by default the scheduler's, or the command line.
        machine, processes: what it runs on, and who owners are.
    """

    def __init__(
        self,
        storage: Storage,
        lease_s: float,
        is_needed: Callable[[], bool] = lambda: True,
        job: str = "",
        machine: Machine = THIS_MACHINE,
        processes: Processes = processes_of_this_machine,
    ):
        self._machine, self._processes = machine, processes
        self._storage, self._files, self._lease_s = storage, storage.files, lease_s
        self._is_needed, self._job = is_needed, job
        self._token = secrets.token_hex(8)
        self._claim: Claim | None = None
        self._is_over = False
        self._lock = machine.changes()
        self._loss: LeaseError | None = None

    # ---- to get it -------------------------------------------------------------------------------

    def acquire(self, is_patient: bool = True) -> None:
        """Takes the folder, once nobody else has it.

        Args:
            is_patient: whether to wait for an owner to end, or for its heartbeat to stop.

        Raises:
            LeaseError: if another training has it.
            OSError: if the folder cannot be written.
        """
        self._end_earlier_one_of_this_process()
        patience_s = _PATIENCE * self._lease_s if is_patient else 0.0
        contender, has_told = Contender(self._lease_s, patience_s), False
        while True:
            fence, data = self._newest()
            claim = Claim.from_bytes(fence, data)
            decision = contender.decide(fence, data, self._is_over_by(claim), self._machine.now_s())
            if decision == "take" and self._take(fence, claim):
                break
            if decision == "give up":
                raise self._in_use(claim)
            if decision == "wait" and not has_told:
                has_told = True
                text = "%s is in use by %s. Waiting up to %.0f s for it to end, or to be silent."
                _logger.warning(text, self._storage.root, _name(claim), patience_s)
            self._machine.sleep(self._lease_s / _POLLS)
        _leases[self._storage.key] = self
        self._machine.start(self._beat, "tfparallel-lease")

    def _is_over_by(self, claim: Claim | None) -> bool:
        """Whether its process has ended, or is this one, whose earlier training has."""
        if claim is None:
            return False
        owner = claim.owner
        return self._processes.has_ended(owner) or self._processes.is_this_process(owner)

    def _take(self, fence: int, before: Claim | None) -> bool:
        """Makes the next claim, unless somebody else has; then nothing of others is published."""
        claim = Claim(fence + 1, self._token, self._processes.this_process(self._job))
        claim = dataclasses.replace(claim, last_number=before.last_number if before else 0)
        if not self._files.create_claim(claim.fence, claim.to_bytes()):
            return False
        if self._newest()[0] != claim.fence:  # `fence` was seen long ago
            self._files.delete_claim(claim.fence)
            return False
        self._claim = claim
        try:
            self._sweep()
        except OSError:
            self.release()
            raise
        return True

    def _sweep(self) -> None:
        """Removes what others have begun, notes what counts, and then the older claims."""
        assert self._claim is not None
        highest = self._files.sweep(self._token, self._claim.fence)
        accepted = self._files.accepted()
        older_ones = [fence for fence in self._files.claims() if fence < self._claim.fence]
        self._rewrite(
            last_number=max(highest, self._claim.last_number, *map(self._last_number, older_ones)),
            accepted=None if accepted is None else tuple(draft.published for draft in accepted),
        )
        for older in older_ones:
            self._files.delete_claim(older)

    def _last_number(self, fence: int) -> int:
        """Of a claim now: its owner may have gone on between the look at it and the next claim."""
        claim = Claim.from_bytes(fence, self._files.read_claim(fence))
        return 0 if claim is None else claim.last_number

    def _end_earlier_one_of_this_process(self) -> None:
        earlier = _leases.get(self._storage.key)
        if earlier is None or earlier is self:
            return
        if earlier._is_needed() and earlier._claim is not None:
            raise self._in_use(earlier._claim)
        earlier.release()

    # ---- while it lasts --------------------------------------------------------------------------

    @property
    def fence(self) -> int:
        """The fencing number; 0 while the folder is not this training's."""
        return 0 if self._claim is None else self._claim.fence

    def begin(self) -> Draft:
        """Starts a backup, with a number that none has had before.

        Raises:
            LeaseError: if another training has the folder.
            OSError: if the folder cannot be written.
        """
        if self._claim is None:
            self.acquire(is_patient=False)
        assert self._claim is not None
        self.require()
        try:
            claim = self._claim
            draft = self._storage.begin(self._token, claim.fence, above=claim.last_number)
        except OSError:
            self.require()  # the next owner may have removed the folder: say so
            raise
        self._rewrite(last_number=draft.number)
        return draft

    def require(self) -> None:
        """Looks whether the folder is still this training's.

        Raises:
            LeaseError: naming who has it now.
        """
        with self._lock:  # the heartbeat rewrites the claim, not everywhere at once
            for _ in range(_LOOKS):
                fence, data = self._newest()
                if data:
                    break
                # The next owner has removed it between the two looks, or rewrites it.
                self._machine.sleep(self._lease_s / _POLLS / _LOOKS)
        newest = Claim.from_bytes(fence, data)
        if newest is None and fence == self.fence:
            raise OSError(errno.EIO, "the claim on it is damaged", str(self._storage.root))
        if not owns(self._token, newest):
            self._loss = self._lost(newest)
            raise self._loss

    def raise_if_lost(self) -> None:
        """Raises what the last look at the folder has found; reads nothing."""
        if self._loss is not None:
            raise self._loss

    def release(self, forget: bool = False) -> None:
        """Gives the folder to whoever comes next; does nothing where it is another's already.

        Args:
            forget: there are no backups whose numbers a claim would keep: it goes, too, where
                nothing of others can appear later.
        """
        with self._lock:
            self._is_over = True
            self._lock.notify_all()
            if _leases.get(self._storage.key) is self:
                del _leases[self._storage.key]
            if self._claim is None or self._loss is not None:
                return
            try:
                self.require()
                if forget and self._files.accepted() is None:
                    self._files.delete_claim(self._claim.fence)
                else:
                    self._rewrite(is_released=True)
            except (LeaseError, OSError) as error:
                _logger.info("The lease of %s ends by its time. %s", self._storage.root, error)
            self._claim = None

    def _beat(self) -> None:
        while not self._is_over_in(self._lease_s / BEATS):
            if not self._is_needed():
                self.release()
                return
            try:
                with self._lock:
                    if self._is_over or self._claim is None:
                        return
                    self.require()
                    self._rewrite(beat=self._claim.beat + 1)
            except LeaseError as error:
                _logger.error("%s", error)
                return
            except OSError as error:
                _logger.warning("No heartbeat in %s: %s", self._storage.root, error)

    def _is_over_in(self, seconds: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: self._is_over, seconds)

    def _rewrite(self, **changes: object) -> None:
        with self._lock:
            assert self._claim is not None
            claim = dataclasses.replace(self._claim, **changes)  # type: ignore[arg-type]
            try:
                self._files.rewrite_claim(claim.fence, claim.to_bytes())
            except FileNotFoundError:
                self.require()  # the next owner has removed it, which is an error of the lease
                raise
            self._claim = claim

    def _newest(self) -> tuple[int, bytes]:
        """The newest claim and what its file holds: nothing where it went meanwhile."""
        fence = max(self._files.claims(), default=0)
        return fence, (self._files.read_claim(fence) if fence else b"")

    # ---- what it says ----------------------------------------------------------------------------

    def _in_use(self, claim: Claim | None) -> LeaseError:
        return LeaseError(
            f"A training has its backup_dir to itself. Received: {self._storage.root}, in use by "
            f"{_name(claim)}. Stop that one, wait until it has ended, or use another backup_dir."
        )

    def _lost(self, newest: Claim | None) -> LeaseError:
        mine = "" if self._claim is None else f" ({self._claim.owner})"
        return LeaseError(
            f"Expected {self._storage.root} to be this training's{mine}. Received: "
            f"{'no claim on it' if newest is None else _name(newest)}, which has taken it over, as "
            f"for {self._lease_s:g} s nothing was heard of this one. It publishes no backup any "
            "more; the other one goes on."
        )


def _name(claim: Claim | None) -> str:
    return "an unknown training (its claim is damaged)" if claim is None else str(claim.owner)


def _release_all() -> None:
    for lease in list(_leases.values()):
        lease.release()


_leases: dict[str, Lease] = {}  # of this process, by folder
atexit.register(_release_all)
