"""The workers that make one backup together.

One worker is the common case: it agrees with itself.
"""

import tensorflow as tf

from tfparallel.coordination.agreement import Agreement
from tfparallel.replicas.training import training_of


class Workers:
    """This worker and its peers, in one training.

    Attributes:
        rank, num_workers: this worker's position, and how many there are.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        own = training_of(strategy).agreement()
        if own is None:
            self._agreement, self.num_workers, self.rank = None, 1, 0
        else:
            self._agreement = own.sequence(f"backup/{next(own.numbers)}")
            self.num_workers, self.rank = own.num_workers, own.rank

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes what all have in common."""
        return self.rank == 0

    def agreement(self, purpose: str) -> Agreement | None:
        """A sequence of announcements of its own for a thread, or None for one worker.

        An announcement may take as long as writing a large file, but not longer than its writer.
        """
        return None if self._agreement is None else self._agreement.sequence(purpose)


def exchange(agreement: Agreement | None, kind: str, value: object) -> list:
    """What every worker announced, by rank.

    Raises:
        DisagreementError: if a peer has died, or is about to do something else.
    """
    return [value] if agreement is None else agreement.exchange(kind, value)
