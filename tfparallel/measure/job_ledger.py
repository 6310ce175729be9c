"""What one run of a job has spent since its process started, told to the ledger of all runs."""

from collections.abc import Mapping
from pathlib import Path

from tfparallel.coordination.waited import take_waited_s
from tfparallel.measure.goodput import Goodput, Ledger, goodput, process_started_at, read_ledger
from tfparallel.measure.record import added


class JobLedger:
    """One run's side of the ledger; before its first step it tells that it has started only.

    It is made when the training begins: what this thread has waited for others until then is told
    as such, what it waits later is within steps and callbacks.

    Args:
        folder: one for all runs of the job.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._ledger = Ledger(folder, process_started_at())
        self._before = {"waiting for workers": take_waited_s()}  # and epochs that have ended
        self._restored_s: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether it is time for a line."""
        return self._ledger.is_due

    def begin(self, restored_s: float) -> None:
        """The first step is about to be done; until here, callbacks that save have restored."""
        self._restored_s = restored_s

    def write(self, step: int, seconds: Mapping[str, float]) -> None:
        """A line, of what was spent so far.

        Args:
            step: of the training, over all runs.
            seconds: by category, of the epoch that goes on.
        """
        take_waited_s()  # a training after this one does not tell of it again
        if self._restored_s is not None:
            restored = {"restoring": self._restored_s, "saving": -self._restored_s}
            self._ledger.write(step, added(self._before, seconds, restored))

    def end_epoch(self, step: int, seconds: Mapping[str, float]) -> None:
        """An epoch has ended that took `seconds` by category."""
        self._before = added(self._before, seconds)
        self.write(step, {})

    def goodput(self) -> Goodput:
        """Of the whole job so far."""
        return goodput(read_ledger(self._folder))
