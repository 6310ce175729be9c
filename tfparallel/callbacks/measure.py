"""The callback that measures where the time of a training goes."""

import os
from pathlib import Path
from typing import Literal

import keras

from tfparallel.callbacks.backup.workers import Workers
from tfparallel.callbacks.fit_batches import batch_spec
from tfparallel.callbacks.fit_clock import FitClock
from tfparallel.callbacks.model_use import ModelUse, Peak
from tfparallel.callbacks.noise_watch import NoiseWatch
from tfparallel.callbacks.reporter import Reporter
from tfparallel.checked_types import checks_types
from tfparallel.communication.link_times import NO_LINKS
from tfparallel.internals.keras_trainer import Fit, fit_that_tells, strategy_of
from tfparallel.measure.job_ledger import JobLedger
from tfparallel.measure.record import Record, whole_training
from tfparallel.measure.training_clock import Epoch
from tfparallel.measure.verdict import Verdict
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.one_device_speed import one_device_rows_per_s


@checks_types
class Measure(keras.callbacks.Callback):
    """Says after each epoch, and at the end, how fast a training is and where its time goes.

    Samples per second; how long steps take; the shares of the wall time that went into waiting for
    data, computing, communication, a pipeline's bubble, waiting for the slowest rank or stage,
    Python, saving, tracing and validation; and in a sentence, what costs the most and what would
    help. docs/measure.md says what of it is measured and what is derived. Weights are the same, to
    the bit, with and without it.

    In a job of several processes all pass it. The first one speaks.

    Args:
        folder: where a line of JSON for each epoch, and scalars for TensorBoard, are written; None
            writes nothing.
        verbose: 0 prints nothing, 1 a screen at the end, 2 also one for each epoch.
        one_device_rows_per_s: samples per second on one device, measured before: speed-up and
            efficiency are told; "measure": each process measures steps of a second model like it,
            on one device, before the training.
        noise_every: every so many steps, squares of the replicas' gradients are noted, from which
            the noise scale and a batch size are told; None notes nothing. It is traced once more
            for that. Of `steps_per_execution` steps all do, in each so manyth execution.
            Nothing is told of one replica, under `ShardedStrategy` and parameter servers with
            mode="async".
        peak_flops_per_s: floating-point operations a second of all devices of the job together, of
            which is told how many the model needs (MFU); "measure": each process multiplies
            matrices on its devices before the training, 0.2 s; None tells nothing.

    Attributes:
        records: what was measured, a `Record` for each epoch.
        total: the `Record` of the whole training, when it has ended.
        verdict: about the last epoch; about the whole training, when it has ended.

    Raises:
        ValueError: for arguments out of range, and outside of `Model.fit`.
    """

    # Keras runs callbacks beside the training only if all may be: this one has no say in it.
    async_safe = True

    def __init__(
        self,
        folder: str | os.PathLike | None = None,
        verbose: int = 2,
        one_device_rows_per_s: float | Literal["measure"] | None = None,
        noise_every: int | None = None,
        peak_flops_per_s: Peak | None = None,
    ):
        super().__init__()
        self._peak = peak_flops_per_s
        if verbose not in (0, 1, 2):
            raise ValueError(f"`verbose` must be 0, 1 or 2. Received: {verbose!r}.")
        _check_figure("one_device_rows_per_s", one_device_rows_per_s, "samples per second")
        _check_figure("peak_flops_per_s", peak_flops_per_s, "operations a second of all devices")
        if noise_every is not None and noise_every < 1:
            raise ValueError(f"`noise_every` must be a number of steps. Received: {noise_every!r}.")
        self._noise_every = noise_every
        self._folder = None if folder is None else Path(folder)
        self._verbose, self._one_device = verbose, one_device_rows_per_s
        self._timed: FitClock | None = None
        self._noise: NoiseWatch | None = None
        self.records: list[Record] = []
        self.total: Record | None = None
        self.verdict: Verdict | None = None

    # ---- what Keras tells ------------------------------------------------------------------------

    def on_train_begin(self, logs: object = None) -> None:
        """Puts the clock around steps and callbacks."""
        fit = fit_that_tells(self.model)
        if fit is None:
            raise ValueError(
                "Measure is a callback of Model.fit, whose steps it measures. Received: a training "
                "that is not Keras's fit."
            )
        self._stop()  # after a training that has failed
        self.records, self.total, self._epoch = [], None, 0
        strategy = strategy_of(self.model)
        extended = strategy.extended if isinstance(strategy, KerasStrategy) else None
        workers = Workers(self.model.distribute_strategy)
        agreement = workers.agreement("measure")
        one_device, folder = self._alone(fit), self._folder
        self._reporter = Reporter(self.model, extended, workers, agreement, folder, one_device)
        if extended is not None:
            extended._tell_stages_apart(self.model)
        if self._noise_every is not None and extended is not None:
            self._noise = NoiseWatch(self.model, extended, self._noise_every, agreement)
        self._use = None
        if self._peak is not None:
            devices = self._reporter.compute_devices()
            self._use = ModelUse(self.model, fit, self._peak, devices, agreement)
        self._ledger = None if folder is None or not workers.is_chief else JobLedger(folder)
        links = (lambda: NO_LINKS) if extended is None else extended._link_times
        after_step = None if self._ledger is None else self._write_ledger_if_due
        self._timed = FitClock(self.model, fit, links, self, self._begin_job, after_step)

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """A step is about to be done."""
        if self._timed is not None:
            self._timed.note_batch()
        if self._noise is not None:
            self._noise.begin_step()

    def on_test_begin(self, logs: object = None) -> None:
        """Validation begins."""
        if self._timed is not None:
            self._timed.clock.begin_validation()

    def on_test_end(self, logs: object = None) -> None:
        """Validation ends."""
        if self._timed is not None:
            self._timed.clock.end_validation()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Tells of the epoch; what callbacks do at its end belongs to the next one."""
        self._epoch = epoch
        record = self._record(self._running.clock.end_epoch())
        self.records.append(record)
        self.verdict = self._tell(record, self._verbose >= 2)

    def on_train_end(self, logs: object = None) -> None:
        """Tells of the whole training."""
        rest = self._record(self._running.clock.end_epoch())
        self.total = whole_training([*self.records, rest])
        self.verdict = self._tell(self.total, self._verbose >= 1)
        self._stop()

    def _alone(self, fit: Fit) -> float | None:
        """Samples per second on one device."""
        if self._one_device != "measure":
            return self._one_device
        spec, rows = batch_spec(fit)
        strategy = self.model.distribute_strategy
        return one_device_rows_per_s(self.model, strategy, spec, rows)

    # ---- what becomes of it ----------------------------------------------------------------------

    @property
    def _running(self) -> FitClock:
        assert self._timed is not None, "between a training's beginning and its end"
        return self._timed

    def _stop(self) -> None:
        """Takes all away that was put into the training."""
        for each in (self._timed, self._noise):
            if each is not None:
                each.stop()
        self._timed = self._noise = None

    def _begin_job(self) -> None:
        """The first step is about to be done; what savers did before it was restoring."""
        if self._ledger is not None:
            outside = self._running.clock.epoch.spent.outside_s
            self._ledger.begin(sum(outside.get(name, 0.0) for name in self._running.saving))
            self._write_ledger()

    def _write_ledger_if_due(self) -> None:
        if self._ledger is not None and self._ledger.is_due:
            self._write_ledger()

    def _write_ledger(self) -> None:
        """What this process has spent so far."""
        timed = self._running
        seconds = self._reporter.seconds(timed.clock.so_far(), timed)
        if self._ledger is not None:
            self._ledger.write(timed.step, seconds)

    def _record(self, epoch: Epoch) -> Record:
        timed = self._running
        noise = None if self._noise is None else self._noise.end_epoch(timed.batch_size)
        use = None if self._use is None else self._use.figures()
        more = {"noise": noise, "use": use}
        record = self._reporter.record(self._epoch, epoch, timed, more)
        if self._ledger is not None:
            self._ledger.end_epoch(timed.step, record.seconds)
        return record

    def _tell(self, record: Record, is_shown: bool) -> Verdict:
        return self._reporter.tell(record, is_shown, self._running.batch_size, self._of_the_job)

    def _of_the_job(self) -> list[str]:
        """Its goodput, at the end."""
        return [str(self._ledger.goodput())] if self._ledger is not None and self.total else []


def _check_figure(name: str, value: float | str | None, what: str) -> None:
    """Of an argument that is a figure, or shall be measured, or is not told."""
    is_figure = isinstance(value, int | float) and value > 0
    if value is not None and value != "measure" and not is_figure:
        raise ValueError(f"`{name}` must be {what}, above 0, or 'measure'. Received: {value!r}.")
