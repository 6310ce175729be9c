"""Horovod jobs whose ranks come and go: training is begun anew, and goes on from the last backup.

Horovod's elastic mode starts ranks on the hosts that a discovery script names, and stops counting
on those that fail. The ranks that remain lose their connections and have to build them again, with
another rank and another number of ranks. What they train is a function of the rank and of how many
there are; so all of it is built again, and `BackupAndRestore` puts it where it was.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.communication import horovod_start as horovod
from tfparallel.communication.horovod_start import HorovodInternalError, HostsUpdatedInterrupt
from tfparallel.coordination.agreement import PeerEndedError
from tfparallel.coordination.writer import end_all
from tfparallel.internals import context
from tfparallel.replicas.training import training_of


class ElasticJob(horovod.State):
    """This rank's side of an elastic job; `run_elastic` makes it.

    It holds no state to keep: that is in the backups.
    """

    def __init__(self) -> None:
        super().__init__(bcast_object=None, get_rank=None)
        self._seed = context.global_seed()

    def callback(self, check_freq: int = 10) -> keras.callbacks.Callback:
        """For `fit`: lets ranks that were added take part, every `check_freq` batches.

        What has been trained since the last backup is trained again, so give it the same number as
        `BackupAndRestore(save_freq=...)`.
        """
        return _HostsCallback(self, check_freq)

    def has_news(self) -> bool:
        """Whether the launcher has told this rank of other hosts."""
        return not self._host_messages.empty()

    def save(self) -> None:
        """Nothing: backups are saved in `fit`."""

    def restore(self) -> None:
        """Nothing: backups are restored in `fit`."""

    def sync(self) -> None:
        """Makes this process as fresh as one that has just been added."""
        for error in end_all(PeerEndedError):
            tf.get_logger().warning("A backup was not finished; the last counts: %s", error)
        keras.backend.clear_session()  # the names of layers count on from where they were
        tf.random.set_seed(self._seed)


def run_elastic(train: Callable[[ElasticJob], object]) -> Callable[[], Any]:
    """Decorator of a function that trains; calls it again whenever ranks have come or gone.

    `train(job)` creates the strategy, the model and the data, and calls `fit` with a
    `BackupAndRestore` and `job.callback()`. The backup's folder is one that all hosts see. Start
    with `horovodrun --host-discovery-script`; without it `train` is called once.

        @tfparallel.run_elastic
        def main(job):
            strategy = tfparallel.HorovodStrategy()
            with strategy.scope():
                model = ...
            backup = tfparallel.callbacks.BackupAndRestore(folder, save_freq=20)
            model.fit(..., callbacks=[backup, job.callback(check_freq=20)])

        main()

    Source: Horovod's elastic mode, https://horovod.readthedocs.io/en/stable/elastic_include.html
    """

    @horovod.run_elastic
    def attempt(job: ElasticJob) -> Any:
        try:
            return train(job)
        except Exception as error:
            if _is_of_a_lost_rank(error):
                raise HorovodInternalError(str(error)) from error
            raise

    return functools.wraps(train)(lambda: attempt(ElasticJob()))


def _is_of_a_lost_rank(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that another rank has ended."""
    if isinstance(error, tf.errors.OpError):
        return "Horovod" in error.message
    lost = isinstance(error, PeerEndedError | ConnectionError)
    return lost or (error is not None and _is_of_a_lost_rank(error.__cause__))


class _HostsCallback(keras.callbacks.Callback):
    def __init__(self, job: ElasticJob, check_freq: int):
        super().__init__()
        if check_freq < 1:
            raise ValueError(f"check_freq is a number of batches. Received: {check_freq}.")
        self._job, self._check_freq = job, check_freq
        self._seen = 0

    def on_train_begin(self, logs: object = None) -> None:
        """Announcements in a sequence of their own."""
        own = training_of(self.model.distribute_strategy).agreement()
        self._agreement = own.sequence(f"hosts/{next(own.numbers)}") if own is not None else None

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """After the last batch has been saved, if it was to be."""
        self._seen += 1
        if self._seen % self._check_freq:
            return
        news = [self._job.has_news()]
        if self._agreement is not None:
            news = self._agreement.exchange("look for new hosts", news[0])
        if any(news):
            raise HostsUpdatedInterrupt(skip_sync=False)
