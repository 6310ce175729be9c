"""A job that stands still ends with an error that says who does not come, instead of hanging.

A collective waits for all ranks. A rank that is stopped, or busy elsewhere, holds up all others,
and none of them can see whom it waits for. So each rank counts the reductions it has begun (its own
gradients are there) and ended, and tells the others from time to time, outside of collectives.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable

from tfparallel.coordination.patience import LONGEST_LOOK_S, Wait, WaitedTooLong
from tfparallel.coordination.tcp_store import TcpStore
from tfparallel.coordination.waiting import look

_MAX_PERIOD_S = LONGEST_LOOK_S * 0.8
_OTHERS = "other ranks"
_NAMES_AFTER_S = 10.0  # it asks the others how far they are, to name them when it says so
_SILENT_PERIODS = 4  # a rank that has told nothing for so long does not run


class StalledError(RuntimeError):
    """A rank has not come to a collective that the others wait in."""


@dataclasses.dataclass(frozen=True)
class RankProgress:
    """Where a rank is: reductions `begun` and `ended`, and `beat`, how often it has told so."""

    begun: int
    ended: int
    beat: int


class StallWatch:
    """A thread that tells where this rank is, and notices when nothing moves.

    Args:
        store: what the ranks share.
        rank, num_ranks: this rank's position, and how many there are.
        counts: gives the reductions that this rank has begun and ended.
        what: gives what is being reduced, for messages.
        timeout_s: how long a reduction that has begun may take.
        on_stall: called in the thread, once, with the error that names who is missing.
    """

    def __init__(
        self,
        store: TcpStore,
        rank: int,
        num_ranks: int,
        counts: Callable[[], tuple[int, int]],
        what: Callable[[], str],
        timeout_s: float,
        on_stall: Callable[[StalledError], None],
    ):
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._counts, self._what = counts, what
        self._timeout_s, self._on_stall = timeout_s, on_stall
        self._period_s = min(_MAX_PERIOD_S, timeout_s / 4)
        self._beat = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._period_s)

    def _watch(self) -> None:
        last, wait = (0, 0), self._wait((0, 0))
        while not self._stopped.wait(self._period_s):
            counts = self._counts()
            try:
                self._tell(counts)
                if counts != last or counts[0] == counts[1]:
                    last, wait = counts, self._wait(counts)
                    continue
                try:
                    is_slow = wait.waited_s > min(_NAMES_AFTER_S, self._timeout_s / 8)
                    look(wait, self._behind(counts) if is_slow else _OTHERS)
                except WaitedTooLong:
                    missing = self._missing(counts)
                    if missing and not self._stopped.is_set():
                        self._on_stall(StalledError(self._describe(missing, counts[0])))
                        return
            except ConnectionError as error:
                self._watch_alone(counts, wait, str(error))
                return

    def _watch_alone(self, counts: tuple[int, int], wait: Wait, reason: str) -> None:
        """Rank 0 has ended or does not answer, and nobody can be asked: is it waited for?"""
        while counts[0] != counts[1] and self._counts() == counts:
            try:
                look(wait, "rank 0")
            except WaitedTooLong:
                self._on_stall(
                    StalledError(
                        f"All ranks must come to reduction {counts[0]} ({self._what()}) within "
                        f"{self._timeout_s:g} s of one another. Received: {reason} "
                        f"(Rank {self._rank} is speaking.)"
                    )
                )
                return
            if self._stopped.wait(self._period_s):
                return

    def _wait(self, counts: tuple[int, int]) -> Wait:
        what, option = f"come to reduction {counts[0]}", "stall_timeout_s"
        return Wait(f"rank {self._rank}", what, self._timeout_s, time.monotonic(), option)

    def _behind(self, counts: tuple[int, int]) -> str:
        """The ranks that have not come to this reduction, as far as they have told."""
        others = {r: self._progress(r) for r in range(self._num_ranks) if r != self._rank}
        behind = [r for r, each in others.items() if each is None or each.begun < counts[0]]
        return ", ".join(f"rank {r} ({self._store.describe(r)})" for r in behind) or _OTHERS

    def _tell(self, counts: tuple[int, int]) -> None:
        self._beat += 1
        self._store.replace(progress_key(self._rank), json.dumps([*counts, self._beat]))

    def _missing(self, counts: tuple[int, int]) -> dict[int, str]:
        """The ranks that hold up the others, and how."""
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        before = {rank: self._progress(rank) for rank in others}
        for _ in range(_SILENT_PERIODS):
            if self._stopped.wait(self._period_s):
                return {}
            self._tell(counts)  # the others may be asking likewise
        missing = {}
        for rank in others:
            now, earlier = self._progress(rank), before[rank]
            if now is None or now == earlier:
                silent_s = _SILENT_PERIODS * self._period_s
                missing[rank] = f"does not run: it has been silent for {silent_s:.0f} s"
            elif now.begun < counts[0]:
                missing[rank] = f"runs, but has come to reduction {now.begun} only"
        return missing

    def _progress(self, rank: int) -> RankProgress | None:
        try:
            return RankProgress(*json.loads(self._store.get(progress_key(rank), timeout_s=0.0)))
        except TimeoutError:
            return None

    def _describe(self, missing: dict[int, str], begun: int) -> str:
        who = "; ".join(
            f"rank {rank} ({self._store.describe(rank)}) {how}" for rank, how in missing.items()
        )
        return (
            f"All ranks must come to reduction {begun} ({self._what()}) within "
            f"{self._timeout_s:g} s of one another. Received: {who}. A debugger (py-spy dump "
            "--pid) shows what it does; stall_timeout_s allows for longer. "
            f"(Rank {self._rank} is speaking.)"
        )


def progress_key(rank: int) -> str:
    """Where in the store a rank tells its progress; what is there changes while it runs."""
    return f"tfparallel/progress/{rank}"
