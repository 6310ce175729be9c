"""A worker that waits too long in a collective of TensorFlow names who has not come, and ends it.

TensorFlow's own limit of a collective keeps a sleeping thread for each one until the limit has
passed, done or not, and its error names nobody. So each worker counts what it has begun and ended.
While nothing moves, it writes into the store which collective it waits in: who has not written the
same has not come. While all is well nothing is written or sent.
"""

import threading
import time
from collections.abc import Callable, Sequence

from tfparallel.coordination.agreement import Agreement
from tfparallel.coordination.patience import LONGEST_LOOK_S, Wait, WaitedTooLong
from tfparallel.coordination.waiting import look

_MAX_PERIOD_S = LONGEST_LOOK_S * 0.8
_ASKS_FOR_S = 0.1  # a rank that waits has written long ago

Counts = Sequence[tuple[int, int]]


class CollectiveWatch:
    """A thread that notices when nothing moves.

    Args:
        agreement: of the workers; its store is used.
        counts: gives the collectives that this worker has begun and ended, of each kind.
        limit_s: how long one may take; None waits for ever, and says for whom.
        end: called in the thread, once, with the error's text, to make what waits fail.
    """

    def __init__(
        self,
        agreement: Agreement,
        counts: Callable[[], Counts],
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
        last: Counts = []
        while not self._stopped.wait(self._period_s):
            counts = self._counts()
            if counts != last or all(begun == ended for begun, ended in counts):
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

    def _note(self, counts: Counts) -> None:
        """Says that this worker waits there; again changes nothing."""
        self._agreement.store.put(self._key(self._agreement.rank, counts), "waits")

    def _missing(self, counts: Counts) -> str:
        store, own = self._agreement.store, self._agreement.rank
        others = [rank for rank in range(self._agreement.num_workers) if rank != own]
        missing = [rank for rank in others if not self._is_there(rank, counts)]
        if not missing:
            return "the transport between all ranks, which have all come,"
        return ", ".join(f"rank {rank} ({store.describe(rank)})" for rank in missing)

    def _is_there(self, rank: int, counts: Counts) -> bool:
        try:
            return bool(self._agreement.store.get(self._key(rank, counts), _ASKS_FOR_S))
        except TimeoutError:
            return False

    def _key(self, rank: int, counts: Counts) -> str:
        begun = "-".join(str(number) for number, _ in counts)
        return f"tfparallel/{self._agreement.name}/waits/{begun}/{rank}"
