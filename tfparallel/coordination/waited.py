"""How long a thread has waited for other processes of its job to come.

What a step waits for is measured where it waits; this is for all before the first one, where a
machine that is late, or is started again, holds up the whole job.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class _Waited(threading.local):
    """Of one thread: others wait beside the training, for backups."""

    seconds = 0.0
    depth = 0


_waited = _Waited()


@contextlib.contextmanager
def waiting_for_others(now_s: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Within it, the calling thread waits for others; a wait within a wait counts once.

    Args:
        now_s: the clock.
    """
    began_s = now_s()
    _waited.depth += 1
    try:
        yield
    finally:
        _waited.depth -= 1
        if not _waited.depth:
            _waited.seconds += now_s() - began_s


def take_waited_s() -> float:
    """Seconds that the calling thread has waited since it last asked."""
    seconds, _waited.seconds = _waited.seconds, 0.0
    return seconds
