"""What was measured in an epoch: put together with the other processes, judged, written, shown."""

from collections.abc import Callable, Mapping
from pathlib import Path

import keras
import tensorflow as tf

from tfparallel.callbacks.backup.workers import Workers, exchange
from tfparallel.callbacks.fit_clock import FitClock
from tfparallel.coordination.agreement import Agreement
from tfparallel.internals.keras_trainer import strategy_of
from tfparallel.machine.processors import threads_told, usable_cores
from tfparallel.measure.record import Record, added
from tfparallel.measure.screen import (
    efficiency_line,
    noise_line,
    print_screen,
    screen,
    speed_up_line,
    use_line,
)
from tfparallel.measure.shares import NO_PLAN, Plan, Spent, seconds_by_category
from tfparallel.measure.training_clock import Epoch
from tfparallel.measure.utilisation import utilisation
from tfparallel.measure.verdict import Setting, Verdict, judge
from tfparallel.measure.writing import RecordWriter
from tfparallel.replicas.device_names import short_names
from tfparallel.replicas.measured_training import MeasuredTraining


class Reporter:
    """Tells of one training.

    Args:
        model: that is trained.
        extended: of its strategy, if that is one of ours.
        workers: the processes of the job.
        agreement: with them.
        folder: where records are written; None writes nothing.
        one_device_rows_per_s: samples per second on one device, if that is known.
    """

    def __init__(
        self,
        model: keras.Model,
        extended: MeasuredTraining | None,
        workers: Workers,
        agreement: Agreement | None,
        folder: Path | None,
        one_device_rows_per_s: float | None,
    ):
        self._model, self._extended, self._workers = model, extended, workers
        self._agreement, self._one_device = agreement, one_device_rows_per_s
        self._writer = None if folder is None else RecordWriter(folder, workers.rank)

    def seconds(self, spent: Spent, timed: FitClock, behind_s: float = 0.0) -> dict[str, float]:
        """By category."""
        return seconds_by_category(spent, timed.saving, self._plan(), behind_s)

    def record(
        self, number: int, epoch: Epoch, timed: FitClock, more: Mapping[str, object]
    ) -> Record:
        """Of one epoch; all processes call it.

        Args:
            number: of the epoch.
            epoch: what was measured.
            timed: what has measured it.
            more: details; None where one is not known.
        """
        spent, plan, size = epoch.spent, self._plan(), timed.batch_size
        own_s = spent.steps_s - spent.linked_s
        by_rank = exchange(self._agreement, "measure", own_s)
        slowest = max(range(len(by_rank)), key=by_rank.__getitem__)
        seconds = self.seconds(spent, timed, by_rank[slowest] - own_s)
        details = _details(epoch, timed)
        if plan.slowest or len(by_rank) > 1:
            details["slowest"] = plan.slowest or f"rank {slowest}"
        details.update({name: value for name, value in more.items() if value is not None})
        rows = None if size is None else size * epoch.num_steps  # where no clock is at the iterator
        rank = self._workers.rank
        return Record(
            number,
            epoch.num_steps,
            rows if epoch.rows is None else epoch.rows,
            spent.wall_s,
            seconds,
            epoch.step_times(),
            utilisation(seconds, spent.wall_s, plan, by_rank, rank, self._devices()),
            details,
            rank,
        )

    def tell(
        self, record: Record, is_shown: bool, size: int | None, beside: Callable[[], list[str]]
    ) -> Verdict:
        """Judges, writes, and shows on the first rank.

        Args:
            record: of an epoch or the training.
            is_shown: whether it is printed.
            size: rows of a step.
            beside: more lines to print.
        """
        verdict = judge(record, self._setting(size))
        if self._writer is not None:
            self._writer.write(record, verdict)
        if is_shown and self._workers.is_chief:
            of_record = [each(record) for each in (use_line, noise_line, efficiency_line)]
            lines = [self._compared(record), *of_record, *beside()]
            print_screen(screen(record, verdict, [line for line in lines if line]))
        return verdict

    def _plan(self) -> Plan:
        return NO_PLAN if self._extended is None else self._extended._plan_of(self._model)

    def _devices(self) -> list[str]:
        if strategy_of(self._model) is None:
            return ["this process"]
        devices = self._model.distribute_strategy.extended.worker_devices
        return list(dict.fromkeys(short_names(devices)))

    def compute_devices(self) -> list[str]:
        """Full names of the devices of this process, each once; "" is TensorFlow's choice."""
        strategy = strategy_of(self._model)
        if strategy is None:
            return [""]
        extended = strategy.extended
        names = [*extended.worker_devices, *extended.parameter_devices]
        return list(dict(zip(short_names(names), names, strict=True)).values())

    def _num_devices(self) -> int:
        stages = self._plan().utilisation
        return len(stages) or self._model.distribute_strategy.num_replicas_in_sync

    def _compared(self, record: Record) -> str:
        """Speed-up and efficiency against one device, if its speed is known."""
        if self._one_device is None or record.rows is None:
            return ""
        return speed_up_line(record, self._one_device, self._num_devices())

    def _setting(self, size: int | None) -> Setting:
        strategy = self._model.distribute_strategy
        schedule = getattr(strategy, "schedule", None)
        return Setting(
            strategy=type(strategy).__name__,
            num_devices=self._num_devices(),
            batch_size=size,
            microbatches=getattr(schedule, "num_microbatches", 0),
            stages=getattr(schedule, "num_stages", 0),
            cores=usable_cores(),
            threads=tf.config.threading.get_intra_op_parallelism_threads() or threads_told(),
            eager=self._model.run_eagerly,
            steps_at_once=self._model.steps_per_execution,
            gpus=any("GPU" in name for name in self._devices()),
        )


def _details(epoch: Epoch, timed: FitClock) -> dict[str, object]:
    """Names and figures behind the seconds."""
    callbacks = added(epoch.spent.callbacks_s, epoch.spent.outside_s)
    saving = timed.saving
    return {
        "traces": epoch.traces,
        "bytes_sent": epoch.links.bytes_sent,
        "collectives_s": epoch.links.spent_s,
        "callbacks_s": {k: v for k, v in callbacks.items() if k not in saving},
        "saving_s": {k: v for k, v in callbacks.items() if k in saving},
        "iterators_s": epoch.spent.iterators_s,
        "python_s": epoch.spent.python_s,
        "input_stage": timed.slowest_stage,
        "batch_size": timed.batch_size,
    }
