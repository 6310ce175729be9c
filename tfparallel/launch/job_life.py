"""How a group of processes lives and ends: what `processes.py` does, decided without a process.

    a process fails, Ctrl-C, SIGTERM  ->  SIGTERM to all that are of the job, once
    `grace_s` later, or at the end    ->  SIGKILL to the same

Whoever does it hands in events, a clock and the signals' sender, real ones or simulated.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tfparallel.launch.failure import describe_end, exit_status

# A Ctrl-C that comes this long into the stopping is a person's second. Sooner, it is the first one
# twice: `timeout` signals its command and then the command's group. Other signals never hurry.
_IMPATIENCE_S = 0.5


@dataclass(frozen=True)
class Ending:
    """How a job ended.

    Attributes:
        status: the exit status for it, as `run_processes` returns it.
        failed_rank: the rank of the command that failed first; None if all returned 0 or if the
            launcher was told to stop.
    """

    status: int
    failed_rank: int | None = None


@dataclass(frozen=True)
class Exited:
    """A process has ended; `returncode` as in `subprocess`: -n after signal n."""

    rank: int
    returncode: int


@dataclass(frozen=True)
class OutputEnded:
    """Nobody can write to one of the two outputs of a process any more."""

    rank: int


@dataclass(frozen=True)
class Signalled:
    """The launcher was told something by a signal."""

    number: int


Event = Exited | OutputEnded | Signalled


class ProcessGroup(Protocol):
    """The processes of a job, and what is done to them."""

    @property
    def labels(self) -> Sequence[str]:
        """How all are called, also those that have not started."""

    def start(self) -> None:
        """Starts them all, in the order of their ranks."""

    def num_started(self) -> int:
        """How many could be started."""

    def next_event(self, timeout_s: float | None) -> Event | None:
        """What has happened to them or to the launcher; None after `timeout_s`."""

    def terminate(self) -> None:
        """SIGTERM, once, to each process of the job, and to all that they have started."""

    def kill(self) -> None:
        """SIGKILL to each process and its group; it is dead when this returns."""

    def is_any_left(self) -> bool:
        """Whether anything of the job still runs."""

    def note(self, text: str) -> None:
        """Tells a person something; never waits."""


class JobLife:
    """One life of a group of processes, from its start to its end.

    Args:
        group: the processes.
        now_s: a clock that never goes back.

    Attributes:
        returncodes: by rank, of those that have ended.
    """

    def __init__(self, group: ProcessGroup, now_s: Callable[[], float]):
        self._group, self._now_s = group, now_s
        self.returncodes: dict[int, int] = {}
        self._num_ended_outputs = 0

    def run(self, grace_s: float) -> Ending:
        """Starts all, waits for the end of the job, and ends what is left, whatever happens.

        Args:
            grace_s: how long processes may take to end after SIGTERM.
        """
        try:
            self._group.start()
            return self._wait_for_end()
        finally:
            self._stop(grace_s)

    def _wait_for_end(self) -> Ending:
        """Waits until all have returned 0, one has failed, or a signal has come."""
        while len(self.returncodes) < self._group.num_started():
            event = self._group.next_event(None)
            if isinstance(event, Signalled):
                name = signal.Signals(event.number).name
                self._group.note(f"received {name}; stopping all processes")
                return Ending(128 + event.number)
            self._record(event)
            if isinstance(event, Exited) and event.returncode != 0:
                label, end = self._group.labels[event.rank], describe_end(event.returncode)
                self._group.note(f"{label} failed: {end}; stopping all processes")
                return Ending(exit_status(event.returncode), failed_rank=event.rank)
        return Ending(0)

    def _stop(self, grace_s: float) -> None:
        """SIGTERM to all, then SIGKILL to what is left after `grace_s`."""
        self._group.terminate()
        start_s = self._now_s()
        while not self._is_over():
            event = self._group.next_event(max(0.0, start_s + grace_s - self._now_s()))
            if event is None:
                if self._group.is_any_left():  # else it is the reader of our output that is late
                    self._group.note(f"some still run after {grace_s:g} s; killing them")
                break
            if event == Signalled(signal.SIGINT) and self._now_s() > start_s + _IMPATIENCE_S:
                break
            self._record(event)
        self._group.kill()  # also when all have ended: a child without our pipes may be there still

    def _record(self, event: Event | None) -> None:
        if isinstance(event, Exited):
            self.returncodes[event.rank] = event.returncode
        elif isinstance(event, OutputEnded):
            self._num_ended_outputs += 1

    def _is_over(self) -> bool:
        # An open output means a living child of a worker, even if the worker itself has ended.
        num_started = self._group.num_started()
        has_ended = len(self.returncodes) == num_started
        return has_ended and self._num_ended_outputs == 2 * num_started
