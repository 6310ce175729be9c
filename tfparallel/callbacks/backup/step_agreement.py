"""Workers that do something together at the end of the same step, though one of them thought of it.

Workers that train synchronously are at most one step apart: nobody ends step s + 1 before everybody
has begun it. So a worker at the end of step s announces "at the end of s + 1", and enters s + 1
only once a thread of every other worker has confirmed: none of them can have ended s + 1 by then.
A step in which nothing is announced costs nothing.

TensorFlow's `PreemptionCheckpointHandler` works the same way. Source:
https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler
"""

import functools
import json
from collections.abc import Set

from tfparallel.callbacks.backup.workers import Workers
from tfparallel.coordination.agreement import Agreement

_POLL_S = 1.0  # how long the thread of a worker that ends may take to see that it should


class StepAgreement:
    """One worker's side of the announcements of one training.

    Args:
        workers: this worker and its peers.
    """

    def __init__(self, workers: Workers):
        self._agreement = workers.agreement("step")
        self._step = 0
        self._known: list[tuple[str, int]] = []  # what shall be done, and at the end of which step
        self._has_ended = False
        if self._agreement is not None:
            machine, listen = (
                self._agreement.machine,
                functools.partial(self._listen, self._agreement),
            )
            self._has_news = machine.changes()
            self._thread = machine.start(listen, "tfparallel-steps")

    def at_end_of_step(self, wanted: Set[str]) -> Set[str]:
        """What all workers do at the end of this step; each worker calls it at every step.

        Args:
            wanted: what this worker would like to be done soon, for example {"save"}.
        """
        if self._agreement is None:
            return wanted
        self._step += 1
        announced = {what for what, step in self._known if step > self._step}
        for what in sorted(wanted - announced):
            self._announce(self._agreement, what, self._step + 1)
        return {what for what, step in self._known if step == self._step}

    def end(self) -> None:
        """Stops listening; all workers have ended their last step by now."""
        if self._agreement is not None:
            self._has_ended = True
            self._thread.join()

    def _announce(self, agreement: Agreement, what: str, step: int) -> None:
        """Makes `what` known to all workers, unless another worker makes something known now."""
        number = len(self._known)
        key = _key(agreement, number)
        if agreement.store.put(key, json.dumps([what, step])):  # else we confirm another worker's
            for rank in range(agreement.num_workers):
                agreement.value_of(rank, f"{key}/{rank}", f"hear of a {what}")
        with self._has_news:
            self._has_news.wait_for(lambda: len(self._known) > number or self._has_ended)

    def _listen(self, agreement: Agreement) -> None:
        """Hears of every announcement and confirms it, until the training or the cluster ends."""
        while not self._has_ended:
            try:
                self._hear(agreement)
            except TimeoutError:
                continue
            except ConnectionError:
                self._has_ended = True
                with self._has_news:
                    self._has_news.notify_all()

    def _hear(self, agreement: Agreement) -> None:
        key = _key(agreement, len(self._known))
        what, step = json.loads(agreement.store.get(key, _POLL_S))
        with self._has_news:
            self._known.append((what, step))
            self._has_news.notify_all()
        agreement.store.put(f"{key}/{agreement.rank}", "heard")


def _key(agreement: Agreement, number: int) -> str:
    return f"tfparallel/{agreement.name}/{number}"
