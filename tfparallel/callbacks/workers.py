"""The workers that make one backup together: who they are, and how they agree.

One worker is the common case: it agrees with itself.
"""

import itertools
from typing import Any

from tfparallel.communication.agreement import Agreement

_numbers = itertools.count()  # of the trainings of this process, the same on all workers


class Workers:
    """This worker and its peers, in one training.

    Attributes:
        rank, num_workers: this worker's position, and how many there are.
        name: of the training, the same on all workers.
    """

    def __init__(self, strategy: Any):
        extended = strategy.extended
        own = getattr(extended, "_agreement", None)
        self.num_workers: int = getattr(extended, "_num_workers", 1)
        self.rank: int = extended._id_in_cluster if self.num_workers > 1 else 0
        self.name = f"{own._name}/backup/{next(_numbers)}" if own is not None else ""

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes what all have in common."""
        return self.rank == 0

    def agreement(self, purpose: str) -> Agreement | None:
        """A sequence of announcements of its own for a thread, or None for one worker."""
        if self.num_workers == 1:
            return None
        return Agreement(f"{self.name}/{purpose}", self.rank, self.num_workers)


def exchange(agreement: Agreement | None, kind: str, value: Any) -> list:
    """What every worker announced, by rank.

    Raises:
        DisagreementError: if a peer says nothing, or is about to do something else.
    """
    return [value] if agreement is None else agreement.exchange(kind, value)
