"""Lanes: each device of an asynchronous worker takes steps of its own.

    worker 0, GPU:0   lane 0   --1--|--4--|--5--|
    worker 0, GPU:1   lane 1   --2--|--3--|--6--|      one queue, whoever is free takes the next
    worker 1, GPU:0   lane 2   ----7----|--8--|

Two devices of a worker are to the servers what two workers are. What belongs to the machine is the
worker's: whether it answers, and what its TensorFlow can do at a time (`CallsOfWorkers`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lane:
    """A device of a worker, which computes a step at a time."""

    worker: int
    device: str


def lanes_of_workers(workers: Sequence[Sequence[str]]) -> tuple[Lane, ...]:
    """The lanes of workers with these devices, in their order."""
    return tuple(Lane(i, device) for i, devices in enumerate(workers) for device in devices)


@dataclass(frozen=True)
class Turn:
    """A call that has been asked for.

    Attributes:
        worker: that shall run it.
        known_as: what will be known once it has run.
        is_first: it is not known yet.
    """

    worker: int
    known_as: Hashable
    is_first: bool


class CallsOfWorkers:
    """Which calls a worker may run at the same time: known ones. A first one runs alone.

    Why is told in the note "one first call at a time" in `remote_step.py`. Who wants a first call
    goes before known ones that come later, or with many lanes it would never be alone. Decides
    only; `WorkerPool` waits. Not thread-safe.

    Args:
        num_workers: how many there are.
    """

    def __init__(self, num_workers: int):
        self._running = [0] * num_workers
        self._firsts = [0] * num_workers  # asked for and not ended
        self._known: list[set[Hashable]] = [set() for _ in range(num_workers)]

    def ask(self, worker: int, call: Hashable, generation: int) -> Turn:
        """Asks for a call; what is known of an earlier generation counts no more."""
        known_as = generation, call
        is_first = known_as not in self._known[worker]
        self._firsts[worker] += is_first
        return Turn(worker, known_as, is_first)

    def may_begin(self, turn: Turn) -> bool:
        """Whether the call may begin now."""
        return not (self._running if turn.is_first else self._firsts)[turn.worker]

    def begin(self, turn: Turn) -> None:
        """The call begins."""
        self._running[turn.worker] += 1

    def end(self, turn: Turn, has_run: bool) -> None:
        """The call, which had begun, is over; `has_run`: without an error."""
        self._running[turn.worker] -= 1
        self._firsts[turn.worker] -= turn.is_first
        if has_run:
            self._known[turn.worker].add(turn.known_as)
