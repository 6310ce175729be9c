"""A worker that waits too long in a collective of TensorFlow names who has not come, and ends it.

TensorFlow's own limit of a collective keeps a sleeping thread for each one until the limit has
passed, done or not, and its error names nobody. So each worker counts what it has begun and ended.
While nothing moves, it writes into the store which collectives it waits in: who takes part in them
and has not written the same has not come. While all is well nothing is written or sent.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfparallel.coordination.agreement import Agreement
from tfparallel.coordination.patience import LONGEST_LOOK_S, Wait, WaitedTooLong
from tfparallel.coordination.waiting import look

_MAX_PERIOD_S = LONGEST_LOOK_S * 0.8
_ASKS_FOR_S = 0.1  # a rank that waits has written long ago


class Count(NamedTuple):
    """The collectives of a group of ranks: how many are `begun` and `ended`; `ranks` None: all."""

    begun: int
    ended: int
    ranks: tuple[int, ...] | None = None


class CollectiveWatch:
    """A thread that notices when nothing moves.

    Args:
        agreement: of the workers; its store is used.
        counts: gives the collectives that this worker has begun and ended, of each kind; all
            workers have as many kinds, in one order.
        limit_s: how long one may take; None waits for ever, and says for whom.
        end: called in the thread, once, with the error's text, to make what waits fail.
    """

    def __init__(
        self,
        agreement: Agreement,
        counts: Callable[[], Sequence[Count]],
        limit_s: float | None,
        end: Callable[[str], None],
    ):
        self._agreement, self._counts, self._limit_s, self._end = agreement, counts, limit_s, end
        self._period_s = _MAX_PERIOD_S if limit_s is None else min(_MAX_PERIOD_S, limit_s / 4)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="tfparallel collectives", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_MAX_PERIOD_S)

    def _watch(self) -> None:
        last: Sequence[Count] = []
        while not self._stopped.wait(self._period_s):
            counts = self._counts()
            if counts != last or all(each.begun == each.ended for each in counts):
                last, wait = counts, self._wait()
                continue
            try:
                self._note(counts)
                look(wait, self._missing(counts))
            except WaitedTooLong as error:
                if self._counts() == counts:
                    self._end(str(error))
                    return
            except ConnectionError:
                return  # the store's worker has ended: TensorFlow makes the collective fail

    def _wait(self) -> Wait:
        speaker, what = f"rank {self._agreement.rank}", "come to a collective"
        option = "A longer stall_s"
        return Wait(speaker, what, self._limit_s, time.monotonic(), option)

    def _note(self, counts: Sequence[Count]) -> None:
        """Says that this worker waits there; again changes nothing."""
        for kind, count in _waited_in(counts):
            self._agreement.store.put(self._key(self._agreement.rank, kind, count), "waits")

    def _missing(self, counts: Sequence[Count]) -> str:
        store, everyone = self._agreement.store, range(self._agreement.num_workers)
        missing = {
            rank
            for kind, count in _waited_in(counts)
            for rank in count.ranks or everyone
            if rank != self._agreement.rank and not self._is_there(rank, kind, count)
        }
        if not missing:
            return "the transport between all ranks, which have all come,"
        named = ", ".join(f"rank {rank} ({store.describe(rank)})" for rank in sorted(missing))
        has_groups = any(each.ranks is not None for each in counts)
        return f"{named}, or one that it waits for," if has_groups else named

    def _is_there(self, rank: int, kind: int, count: Count) -> bool:
        try:
            return bool(self._agreement.store.get(self._key(rank, kind, count), _ASKS_FOR_S))
        except TimeoutError:
            return False

    def _key(self, rank: int, kind: int, count: Count) -> str:
        return f"tfparallel/{self._agreement.name}/waits/{kind}-{count.begun}/{rank}"


def _waited_in(counts: Sequence[Count]) -> list[tuple[int, Count]]:
    """Of each kind of which a collective has begun and not ended, its number and the count."""
    return [(kind, each) for kind, each in enumerate(counts) if each.begun != each.ended]
