"""How long the processes of a job wait for one another."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """How long the processes of a job wait for one another, in seconds.

    Attributes:
        start_s: the chief, for all processes at the start; None waits for ever.
        worker_s: asynchronous parameter servers: the chief, for a step of one worker before the
            worker counts as stopped; None never gives up on a worker that is alive. Longer than
            any step, tracing included.
        all_workers_s: parameter servers: the chief, for a worker without which training cannot go
            on to come back: the first when all are gone; in sync mode every one.
        ps_s: the chief, for a sign of life of a parameter server; in sync mode of a worker too.
        chief_s: all others, for a chief that is gone to come back.
        stage_s: pipelines: the chief, for a process that does not answer (its stages may compute
            for as long as they like); None waits for ever for one that is stopped.
    """

    start_s: float | None = 600.0
    worker_s: float | None = None
    all_workers_s: float = 300.0
    ps_s: float = 30.0
    chief_s: float = 20.0
    stage_s: float | None = 15.0
