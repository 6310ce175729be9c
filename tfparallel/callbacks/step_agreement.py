"""Workers that do something together at the end of the same step, though one of them thought of it.

Workers that train synchronously are at most one step apart: nobody ends step s + 1 before everybody
has begun it. So a worker at the end of step s announces "at the end of s + 1", and enters s + 1
only once a thread of every other worker has confirmed: none of them can have ended s + 1 by then.
A step in which nothing is announced costs nothing.

TensorFlow's `PreemptionCheckpointHandler` works the same way. Source:
https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler
"""

import json
import threading
from collections.abc import Set

import tensorflow as tf

from tfparallel.callbacks.workers import Workers
from tfparallel.tf_internals import context

_POLL_MS = 1000  # how long the thread of a worker that ends may take to see that it should


class StepAgreement:
    """One worker's side of the announcements of one training.

    Args:
        workers: this worker and its peers.
    """

    def __init__(self, workers: Workers):
        self._workers = workers
        self._step = 0
        self._known: list[tuple[str, int]] = []  # what shall be done, and at the end of which step
        self._has_ended = threading.Event()
        self._has_news = threading.Condition()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        if workers.num_workers > 1:
            self._thread.start()

    def at_end_of_step(self, wanted: Set[str]) -> Set[str]:
        """What all workers do at the end of this step; each worker calls it at every step.

        Args:
            wanted: what this worker would like to be done soon, for example {"save"}.
        """
        if self._workers.num_workers == 1:
            return wanted
        self._step += 1
        announced = {what for what, step in self._known if step > self._step}
        for what in sorted(wanted - announced):
            self._announce(what, self._step + 1)
        return {what for what, step in self._known if step == self._step}

    def end(self) -> None:
        """Stops listening; all workers have ended their last step by now."""
        if self._workers.num_workers > 1:
            self._has_ended.set()
            self._thread.join()

    def _announce(self, what: str, step: int) -> None:
        """Makes `what` known to all workers, unless another worker makes something known now."""
        number = len(self._known)
        try:
            context.context().set_config_key_value(self._key(number), json.dumps([what, step]))
        except tf.errors.AlreadyExistsError:
            pass  # of another worker, which waits for our confirmation
        else:
            for rank in range(self._workers.num_workers):
                self._workers.value_of(rank, f"{self._key(number)}/{rank}", f"hear of a {what}")
        with self._has_news:
            self._has_news.wait_for(lambda: len(self._known) > number or self._has_ended.is_set())

    def _listen(self) -> None:
        """Hears of every announcement and confirms it, until the training or the cluster ends."""
        while not self._has_ended.is_set():
            key = self._key(len(self._known))
            try:
                what, step = json.loads(context.context().get_config_key_value(key, _POLL_MS))
            except tf.errors.DeadlineExceededError:
                continue
            except tf.errors.OpError:
                self._has_ended.set()
                with self._has_news:
                    self._has_news.notify_all()
                return
            with self._has_news:
                self._known.append((what, step))
                self._has_news.notify_all()
            context.context().set_config_key_value(f"{key}/{self._workers.rank}", "heard")

    def _key(self, number: int) -> str:
        return f"tfparallel/{self._workers.name}/step/{number}"
