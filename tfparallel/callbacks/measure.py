"""The callback that measures where the time of a training goes."""

import contextlib
import math
import os
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfparallel.callbacks.backup.callback import BackupAndRestore
from tfparallel.callbacks.backup.workers import Workers, exchange
from tfparallel.communication.link_times import LinkTimes
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_trainer import (
    fit_that_tells,
    num_traces,
    strategy_of,
    surrounded_steps,
)
from tfparallel.machine.processors import usable_cores
from tfparallel.measure.goodput import Ledger, goodput, process_started_at, read_ledger
from tfparallel.measure.input_wait import InputWait
from tfparallel.measure.noise_scale import NoiseScale, noise_rows, suggest
from tfparallel.measure.record import Record
from tfparallel.measure.screen import noise_line, print_screen, screen
from tfparallel.measure.shares import NO_PLAN, Plan, Spent, seconds_by_category
from tfparallel.measure.training_clock import Epoch, Sources, TrainingClock
from tfparallel.measure.verdict import Setting, Verdict, judge
from tfparallel.measure.writing import RecordWriter
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.device_names import short_names
from tfparallel.replicas.noise_probe import mean_estimate

_TIMED = (
    "on_train_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_epoch_begin",
    "on_epoch_end",
)
_SAVES = (BackupAndRestore, keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


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
            efficiency are told.
        noise_every: every so many steps, squares of the replicas' gradients are noted, from which
            the noise scale and a batch size are told; None notes nothing. The step is traced anew.
            Nothing is told of one replica, under `ShardedStrategy` and parameter servers with
            mode="async".

    Attributes:
        records: what was measured, a `Record` for each epoch.
        total: the `Record` of the whole training, when it has ended.
        verdict: about the whole training.

    Raises:
        ValueError: for arguments out of range, and outside of `Model.fit`.
    """

    # Keras runs callbacks beside the training only if all may be: this one has no say in it.
    async_safe = True

    def __init__(
        self,
        folder: str | os.PathLike | None = None,
        verbose: int = 2,
        one_device_rows_per_s: float | None = None,
        noise_every: int | None = None,
    ):
        super().__init__()
        if verbose not in (0, 1, 2):
            raise ValueError(f"`verbose` must be 0, 1 or 2. Received: {verbose!r}.")
        if one_device_rows_per_s is not None and not one_device_rows_per_s > 0:
            raise ValueError(
                "`one_device_rows_per_s` must be samples per second, above 0. Received: "
                f"{one_device_rows_per_s!r}."
            )
        if noise_every is not None and noise_every < 1:
            raise ValueError(f"`noise_every` must be a number of steps. Received: {noise_every!r}.")
        self._noise_every = noise_every
        self._folder = None if folder is None else Path(folder)
        self._verbose, self._one_device = verbose, one_device_rows_per_s
        self._hooks = contextlib.ExitStack()
        self.records: list[Record] = []
        self.total: Record | None = None
        self.verdict: Verdict | None = None

    # ---- beginning and end -----------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Puts the clock around steps and callbacks."""
        fit = fit_that_tells(self.model)
        if fit is None:
            raise ValueError(
                "Measure is a callback of Model.fit, whose steps it measures. Received: a training "
                "that is not Keras's fit."
            )
        self._hooks.close()  # of a training that has failed
        self._hooks = contextlib.ExitStack()
        self.records, self.total = [], None
        self._fit, self._epoch, self._step = fit, 0, -1
        self._has_run = False
        self._spent_before: dict[str, float] = {}
        self._restored_s = 0.0
        strategy = strategy_of(self.model)
        self._extended = strategy.extended if isinstance(strategy, KerasStrategy) else None
        self._workers = Workers(self.model.distribute_strategy)
        self._agreement = self._workers.agreement("measure")
        self._input: InputWait | None = None
        self._stage: dict[str, Any] = {}
        self._clock = TrainingClock(self._sources())
        self._noise, self._probe = NoiseScale(decay=0.5), None
        if self._noise_every is not None and self._extended is not None:
            self._probe = self._extended._probe_noise(self._noise_every)
            self.model.make_train_function(force=True)
            self._hooks.callback(self._end_probe)
        self._ledger = None
        self._writer = None
        if self._folder is not None and self._workers.is_chief:
            self._ledger = Ledger(self._folder, process_started_at())
        if self._folder is not None:
            self._writer = RecordWriter(self._folder, self._workers.rank)
        self._hooks.enter_context(surrounded_steps(fit.epoch_iterator, self._around_steps))
        for callback in fit.callbacks.callbacks:
            if callback is not self:
                self._time(callback)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step is done."""
        self._has_run = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation begins."""
        self._clock.begin_validation()

    def on_test_end(self, logs: Any = None) -> None:
        """Validation ends."""
        self._clock.end_validation()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tells of the epoch; what callbacks do at its end belongs to the next one."""
        self._epoch = epoch
        record = self._record(self._clock.end_epoch())
        self.records.append(record)
        self._spent_before = _added(self._spent_before, dict(record.seconds))
        self._write_ledger()
        self._tell(record, self._verbose >= 2)

    def on_train_end(self, logs: Any = None) -> None:
        """Tells of the whole training."""
        self._hooks.close()
        rest = self._record(self._clock.end_epoch())
        self._spent_before = _added(self._spent_before, dict(rest.seconds))
        self._write_ledger()
        self.total = _sum([*self.records, rest])
        self.verdict = self._tell(self.total, self._verbose >= 1)

    # ---- measuring -------------------------------------------------------------------------------

    def _sources(self) -> Sources:
        extended = self._extended
        return Sources(
            links=_no_links if extended is None else extended._link_times,
            traces=lambda: num_traces(self.model),
            waited_s=lambda: 0.0 if self._input is None else self._input.waited_s,
            rows=lambda: None if self._input is None else self._input.rows,
            splits_python=not (self.model.run_eagerly or self.model.jit_compile),
        )

    def _around_steps(self, steps: Iterator[tuple]) -> Iterator[tuple]:
        """The steps of one epoch, each measured."""
        clock = self._clock
        count = 0
        while True:
            with clock.making_iterators():
                step = next(steps, None)
                if step is None:
                    return
                first, last, batches = step
                batches = self._measured(batches)
            if self._step < 0:  # what a backup restores is there
                self._begin_job()
            clock.begin_step()
            self._has_run = False
            try:
                yield first, last, batches
            except GeneratorExit:  # the data have ended, or a callback has ended the epoch
                clock.forget_step()
                raise
            if not self._has_run:  # a resumed training leaves out the steps that it has had
                clock.forget_step()
                continue
            clock.end_step()
            self._step += last - first + 1
            if self._ledger is not None and self._ledger.is_due:
                self._write_ledger()
            count += 1
            if count & (count - 1) == 0 and self._input is not None:  # 1, 2, 4, 8, ...
                self._stage = self._input.slowest_stage() or self._stage

    # ---- the job, over its restarts --------------------------------------------------------------

    def _begin_job(self) -> None:
        """The first step is about to be done; what savers did before it was restoring."""
        iterations = getattr(self.model.optimizer, "iterations", None)
        self._step = 0 if iterations is None else int(iterations.numpy())
        saving, outside = self._saving(), self._clock.epoch.spent.outside_s
        self._restored_s = sum(outside.get(name, 0.0) for name in saving)
        self._write_ledger()

    def _write_ledger(self) -> None:
        """What this process has spent so far."""
        if self._ledger is not None and self._step >= 0:
            seconds = _added(self._spent_before, self._seconds(self._clock.so_far()))
            restored = {"restoring": self._restored_s, "saving": -self._restored_s}
            self._ledger.write(self._step, _added(seconds, restored))

    def _seconds(self, spent: Spent, behind_s: float = 0.0) -> dict[str, float]:
        """By category."""
        return seconds_by_category(spent, self._saving(), self._plan(), behind_s)

    def _saving(self) -> frozenset[str]:
        savers = [each for each in self._fit.callbacks.callbacks if isinstance(each, _SAVES)]
        return frozenset(type(each).__name__ for each in savers)

    def _goodput(self, record: Record) -> str:
        """Of the whole job, at its end."""
        if self._ledger is None or self._folder is None or record.epoch is not None:
            return ""
        return str(goodput(read_ledger(self._folder)))

    def _measured(self, batches: Any) -> Any:
        """The iterator of a step with a clock at it; one of another kind as it is."""
        if isinstance(batches, types.GeneratorType):
            return self._timed_batches(batches)
        if not isinstance(batches, tf.data.Iterator):
            return batches
        if self._input is None:
            self._input = InputWait()
            self._clock.restart_counting()
        return self._input.around(batches)

    def _timed_batches(self, batches: Iterator) -> Iterator:
        """Batches that Python gives, one after the other."""
        while True:
            with self._clock.waiting_for_input():
                batch = next(batches)
            yield batch

    def _time(self, callback: keras.callbacks.Callback) -> None:
        """Puts the clock around what Keras tells a callback."""
        name = type(callback).__name__

        def timed(original: Callable, *args: Any, **kwargs: Any) -> Any:
            with self._clock.in_callback(name):
                return original(*args, **kwargs)

        for method in _TIMED:
            if getattr(type(callback), method) is not getattr(keras.callbacks.Callback, method):
                self._hooks.enter_context(
                    shadowed(
                        callback,
                        method,
                        wrapped(callback, method, timed),
                        during="a training that is measured",
                        why="What each callback takes of the time is measured.",
                    )
                )

    # ---- telling ---------------------------------------------------------------------------------

    def _record(self, epoch: Epoch) -> Record:
        spent, plan = epoch.spent, self._plan()
        saving = self._saving()
        own_s = spent.steps_s - spent.linked_s
        by_rank = exchange(self._agreement, "measure", own_s)
        slowest = max(range(len(by_rank)), key=by_rank.__getitem__)
        seconds = self._seconds(spent, by_rank[slowest] - own_s)
        callbacks = _added(spent.callbacks_s, spent.outside_s)
        details: dict[str, Any] = {
            "traces": epoch.traces,
            "bytes_sent": epoch.links.bytes_sent,
            "callbacks_s": {k: v for k, v in callbacks.items() if k not in saving},
            "saving_s": {k: v for k, v in callbacks.items() if k in saving},
            "input_stage": self._stage,
        }
        if plan.slowest or len(by_rank) > 1:
            details["slowest"] = plan.slowest or f"rank {slowest}"
        if (noise := self._noise_so_far()) is not None:
            details["noise"] = noise
        return Record(
            self._epoch,
            epoch.num_steps,
            epoch.rows if epoch.rows is not None else self._rows_by_size(epoch.num_steps),
            spent.wall_s,
            seconds,
            epoch.step_times(),
            self._utilisation(plan, seconds, spent.wall_s, by_rank),
            details,
            self._workers.rank,
        )

    def _end_probe(self) -> None:
        """The next training has a step without squares."""
        if self._extended is not None:
            self._extended._probe_noise(None)
            self.model.train_function = None

    def _noise_so_far(self) -> dict[str, Any] | None:
        """The noise scale after another epoch; None where it is not known."""
        if self._probe is None:
            return None
        found = mean_estimate(exchange(self._agreement, "noise", self._probe.sums()))
        if found is not None:
            self._noise.add(found)
        smoothed, size = self._noise.smoothed, self._batch_size()
        if smoothed is None:
            return None
        rows = noise_rows(smoothed)
        suggested = None if size is None else suggest(rows, size)
        return {
            "squared_gradient": smoothed.squared_gradient,
            "variance": smoothed.variance,
            "rows": rows if math.isfinite(rows) else None,
            "suggestion": None if suggested is None else suggested._asdict(),
        }

    def _plan(self) -> Plan:
        return NO_PLAN if self._extended is None else self._extended._plan_of(self.model)

    def _rows_by_size(self, steps: int) -> int | None:
        """Rows of steps whose iterator has no clock, by the size of a batch."""
        size = self._batch_size()
        return None if size is None else size * steps

    def _batch_size(self) -> int | None:
        return self._fit.epoch_iterator.data_adapter.batch_size

    def _utilisation(
        self, plan: Plan, seconds: dict[str, float], wall_s: float, by_rank: list[float]
    ) -> dict[str, float]:
        """Busy over all time, by device: of a pipeline's stages, or of ranks, or of replicas."""
        if wall_s <= 0:
            return {}
        graph_s = seconds["compute"] + seconds["bubble"]
        if plan.utilisation:
            graph_s += seconds["imbalance"]
            return {name: share * graph_s / wall_s for name, share in plan.utilisation.items()}
        compute = seconds["compute"] / wall_s
        if len(by_rank) > 1:
            own = by_rank[self._workers.rank]
            return {
                f"rank {rank}": min(1.0, compute * each / own) if own else 0.0
                for rank, each in enumerate(by_rank)
            }
        return dict.fromkeys(self._devices(), compute)

    def _devices(self) -> list[str]:
        if strategy_of(self.model) is None:
            return ["this process"]
        devices = self.model.distribute_strategy.extended.worker_devices
        return list(dict.fromkeys(short_names(devices)))

    def _tell(self, record: Record, is_shown: bool) -> Verdict:
        verdict = judge(record, self._setting())
        if self._writer is not None:
            self._writer.write(record, verdict)
        if is_shown and self._workers.is_chief:
            beside = [self._compared(record), noise_line(record), self._goodput(record)]
            print_screen(screen(record, verdict, [line for line in beside if line]))
        return verdict

    def _compared(self, record: Record) -> str:
        """Speed-up and efficiency against one device, if its speed is known."""
        if self._one_device is None or record.rows_per_s is None:
            return ""
        count = self._num_devices()
        speed_up = record.rows_per_s / self._one_device
        return f"speed-up {speed_up:.2f} of {count}, efficiency {speed_up / count:.0%}"

    def _num_devices(self) -> int:
        stages = self._plan().utilisation
        return len(stages) or self.model.distribute_strategy.num_replicas_in_sync

    def _setting(self) -> Setting:
        schedule = getattr(self.model.distribute_strategy, "schedule", None)
        return Setting(
            strategy=type(self.model.distribute_strategy).__name__,
            num_devices=self._num_devices(),
            batch_size=self._batch_size(),
            microbatches=getattr(schedule, "num_microbatches", 0),
            stages=getattr(schedule, "num_stages", 0),
            cores=usable_cores(),
            threads=tf.config.threading.get_intra_op_parallelism_threads(),
            eager=self.model.run_eagerly,
            gpus=any("GPU" in name for name in self._devices()),
        )


def _no_links() -> LinkTimes:
    return LinkTimes()


def _added(*tables: dict[str, float]) -> dict[str, float]:
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: sum(table.get(key, 0.0) for table in tables) for key in keys}


def _sum(records: list[Record]) -> Record:
    """A training, of its epochs and what came after them."""
    wall_s = sum(each.wall_s for each in records)
    rows = [each.rows for each in records]
    first = records[0]
    details = {
        **first.details,
        "traces": sum(each.details["traces"] for each in records),
        "bytes_sent": sum(each.details["bytes_sent"] for each in records),
        "callbacks_s": _added(*(each.details["callbacks_s"] for each in records)),
        "saving_s": _added(*(each.details["saving_s"] for each in records)),
        "input_stage": records[-1].details["input_stage"],
    }
    slowest = max(records, key=lambda each: each.step.slowest)
    medians = sorted((each.step.median, each.steps) for each in records if each.steps)
    usual = medians[len(medians) // 2][0] if medians else 0.0
    return Record(
        None,
        sum(each.steps for each in records),
        None if any(each is None for each in rows) else sum(each or 0 for each in rows),
        wall_s,
        _added(*(dict(each.seconds) for each in records)),
        type(slowest.step)(
            usual,
            max(each.step.p95 for each in records),
            slowest.step.slowest,
            slowest.step.slowest_step,
            slowest.step.slowest_because,
        ),
        {
            name: sum(each.utilisation.get(name, 0.0) * each.wall_s for each in records) / wall_s
            for name in first.utilisation
        },
        details,
        first.rank,
    )
