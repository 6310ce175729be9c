"""How long the processes of a job wait for one another."""

from dataclasses import dataclass

from tfparallel.checked_types import checks_types


@checks_types
@dataclass(frozen=True)
class WorkerTimeouts:
    """How long the workers of one synchronous training wait for one another, in seconds.

    None waits for ever.

    Attributes:
        start_s: for all workers to start.
        silent_s: for a worker that does not answer at all: stopped, or cut off; and for connections
            between all of them to be opened, at the start.
        stall_s: for a worker that answers and does not come to a collective or an announcement: in
            a slow callback, reading data, compiling.
        write_s: for a worker that writes its part of a backup.
    """

    start_s: float | None = 600.0
    silent_s: float = 60.0
    stall_s: float | None = 1800.0
    write_s: float | None = 14_400.0


@checks_types
@dataclass(frozen=True)
class Timeouts:
    """How long the processes of a job with one chief wait for one another, in seconds.

    Attributes:
        start_s: the chief, for all processes at the start, and they for the chief; None waits for
            ever.
        worker_s: asynchronous parameter servers: the chief, for a step of one worker that answers,
            before the step is given to another; None never gives up on a worker that is alive.
            Longer than any step, tracing included.
        all_workers_s: parameter servers: the chief, for a worker without which training cannot go
            on to come back: the first when all are gone; in sync mode every one.
        ps_s: the chief, for a sign of life of a parameter server or a worker.
        chief_s: all others, for a chief that is gone to come back.
        stage_s: pipelines: the chief, for a process that does not answer (its stages may compute
            for as long as they like); None waits for ever for one that is stopped.
        end_s: all others, at the end, for the last calls of a chief that is done; the chief, half
            as long, for them to be told that it is.
    """

    start_s: float | None = 600.0
    worker_s: float | None = 1800.0
    all_workers_s: float = 300.0
    ps_s: float = 30.0
    chief_s: float = 20.0
    stage_s: float | None = 15.0
    end_s: float = 10.0
