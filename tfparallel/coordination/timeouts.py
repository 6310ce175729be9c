"""How long the workers of one synchronous training wait for one another."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerTimeouts:
    """Limits, in seconds; None waits for ever.

    Attributes:
        start_s: for all workers to start.
        silent_s: for a worker that does not answer at all: stopped, or cut off.
        stall_s: for a worker that answers and does not come to a collective or an announcement: in
            a slow callback, reading data, compiling.
        write_s: for a worker that writes its part of a backup.
    """

    start_s: float | None = 600.0
    silent_s: float = 60.0
    stall_s: float | None = 1800.0
    write_s: float | None = 14_400.0
