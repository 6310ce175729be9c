"""Ends a process that has lost another, where its transport aborts it, or leaves it waiting.

rank 1            killed
rank 0    C++ aborts: who has ended?  "rank 1"  -> store -> says so, waits for 2 and 3, exits
rank 2    waits for rank 0, which waits         <- store:  says so, exits
rank 3    C++ aborts: who has ended?  "rank 1"  -> store -> says so, exits
"""

import os
import threading
import time
from typing import NoReturn

import tensorflow as tf

from tfparallel.coordination.agreement import Agreement
from tfparallel.coordination.last_words import say_before_abort
from tfparallel.coordination.lost_ranks import (
    has_been_found,
    lost_rank_error,
    say_looked,
    who_ended_before,
)

_LISTENS_S = 5.0  # at a time


class EndsTogether:
    """From its making until `stop`, in this process.

    Args:
        agreement: of the ranks, on a `TcpStore`.
    """

    def __init__(self, agreement: Agreement):
        self._agreement = agreement
        self._stopped = threading.Event()
        self._speaking = threading.Lock()
        say_before_abort(self._end_of_this)
        threading.Thread(target=self._listen, daemon=True).start()

    def stop(self) -> None:
        """The training is over, and ranks may end."""
        self._stopped.set()

    def _end_of_this(self) -> None:
        """In the thread that C++ ends: returns where no other rank has ended before."""
        if self._stopped.is_set():
            return
        lost = who_ended_before(self._agreement)
        if lost:
            self._end(lost)

    def _listen(self) -> None:
        """Ends the process where another rank has found out who is lost."""
        while not self._stopped.is_set():
            try:
                lost = has_been_found(self._agreement, _LISTENS_S)
            except ConnectionError:
                return  # rank 0 has ended, as it may: if it is waited for others see it
            if lost:
                self._end(lost)

    def _end(self, lost: str) -> NoReturn:
        if not self._speaking.acquire(blocking=False):
            time.sleep(60.0)  # the other thread ends the process
        tf.get_logger().error("%s", lost_rank_error(self._agreement, lost))
        say_looked(self._agreement)
        os._exit(1)
