"""The clock around the steps, the iterators and the callbacks of one call of `Model.fit`."""

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.callbacks.backup.callback import BackupAndRestore
from tfparallel.communication.link_times import LinkTimes
from tfparallel.internals.eager import is_op_determinism_enabled
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_epochs import surrounded_steps
from tfparallel.internals.keras_trainer import Fit, graphs_of_step
from tfparallel.measure.input_wait import InputWait
from tfparallel.measure.training_clock import Sources, TrainingClock
from tfparallel.replicas.batches_ahead import BatchesAhead

_TIMED = (
    "on_train_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_epoch_begin",
    "on_epoch_end",
)
_NO_STEP = (0, 0, None)
_SAVES = (BackupAndRestore, keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class Traces:
    """How often steps were traced so far, by all functions of a step that the model has had."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._by_function: weakref.WeakKeyDictionary[Any, _TracesOf] = weakref.WeakKeyDictionary()
        self._function: Any = None
        self._last = _TracesOf([], [])  # of `_function`
        self._before = 0  # all others', less what `_last` had when it became the last

    def __call__(self) -> int:
        function = getattr(self._model, "train_function", None)
        if function is not self._function and function is not None:
            self._turn_to(function)
        return self._before + self._last.count()

    def _turn_to(self, function: object) -> None:
        self._last.seen = self._last.count()  # also where it has been replaced since it ran
        self._before += self._last.seen
        if function not in self._by_function:
            self._by_function[function] = _TracesOf(*graphs_of_step(function))
        self._function, self._last = function, self._by_function[function]
        self._before -= self._last.seen


class _TracesOf:
    """Counts how often one function was traced.

    Args:
        graphs: of it.
        steps: within it, traced as often where no graph is around them.

    Attributes:
        seen: the count when it was looked at last before another one.
    """

    def __init__(
        self,
        graphs: Sequence[tf.types.experimental.PolymorphicFunction],
        steps: Sequence[tf.types.experimental.PolymorphicFunction],
    ):
        self._graphs, self._steps = graphs, steps
        self.seen = 0

    def count(self) -> int:
        """So far."""
        for functions in (self._graphs, self._steps):
            total = 0
            for each in functions:  # no comprehension: this is called in each step
                total += each.experimental_get_tracing_count()
            if total:
                return total
        return 0


class FitClock:
    """Runs from its making to `stop`; whoever makes it tells it of Keras's events.

    Args:
        model: that is trained.
        fit: the call.
        links: what collectives of this process have taken so far.
        owner: the callback that measures, whose own time is not taken.
        before_first_step: called when the first step is about to be done.
        after_step: called when a step is done, if anything is.

    Attributes:
        clock: what has been measured.
        step: of the training, over all runs of a job; -1 before the first one.
        slowest_stage: of the input, as `InputWait.slowest_stage`.
    """

    def __init__(
        self,
        model: keras.Model,
        fit: Fit,
        links: Callable[[], LinkTimes],
        owner: keras.callbacks.Callback,
        before_first_step: Callable[[], None],
        after_step: Callable[[], None] | None,
    ):
        self._model, self._fit = model, fit
        self._before_first_step, self._after_step = before_first_step, after_step
        self._input: InputWait | None = None
        self._has_run = self._has_stepped = False  # this step, any of this epoch
        self.step = -1
        self.slowest_stage: dict[str, Any] = {}
        self.clock = TrainingClock(self._sources(links))
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(surrounded_steps(fit.epoch_iterator, self._around_steps))
        for callback in fit.callbacks.callbacks:
            if callback is not owner:
                self._time(callback)

    def stop(self) -> None:
        """Takes all hooks away, and lets go of the training's data."""
        self._hooks.close()
        if self._input is not None:
            self._input.close()

    def note_batch(self) -> None:
        """Keras has begun a step; a resumed training leaves out those that it has had."""
        self._has_run = True
        if not self._has_stepped:
            self.clock.enter_first_step()

    @property
    def saving(self) -> frozenset[str]:
        """The names of callbacks that save."""
        savers = [each for each in self._fit.callbacks.callbacks if isinstance(each, _SAVES)]
        return frozenset(type(each).__name__ for each in savers)

    @property
    def batch_size(self) -> int | None:
        """Rows of a step; None where that is not known."""
        return self._fit.epoch_iterator.data_adapter.batch_size

    def _sources(self, links: Callable[[], LinkTimes]) -> Sources:
        own = weakref.proxy(self)  # no circle, which would keep the data until it is collected
        return Sources(
            links=links,
            traces=Traces(self._model),
            waited_s=lambda: 0.0 if own._input is None else own._input.waited_s,
            rows=lambda: None if own._input is None else own._input.rows,
            splits_python=not (self._model.run_eagerly or self._model.jit_compile),
        )

    # ---- steps -----------------------------------------------------------------------------------

    def _around_steps(self, steps: Iterator[tuple]) -> Iterator[tuple]:
        """The steps of one epoch, each measured."""
        clock, count, self._has_stepped = self.clock, 0, False
        known = measured = None  # what steps of an epoch have in common, as a rule
        while True:
            began_s = clock.now()
            first, last, batches = next(steps, _NO_STEP)
            if batches is not known or not isinstance(batches, tf.data.Iterator):
                known, measured = batches, self._measured(batches)  # Python's: one each execution
            clock.epoch.spent.iterators_s += clock.now() - began_s
            if batches is None:
                return
            if self.step < 0:  # what a backup restores is there
                self.step = self._iterations()
                self._before_first_step()
            clock.begin_step()
            self._has_run = False
            try:
                yield first, last, measured
            except GeneratorExit:  # the data have ended, or a callback has ended the epoch
                clock.forget_step()
                raise
            if not self._has_run:
                clock.forget_step()
                continue
            num_steps = 1 if first == last else self._num_steps(first, last)
            clock.end_step(num_steps)
            self._has_stepped = True
            self.step += num_steps
            if self._after_step is not None:
                self._after_step()
            count += 1
            if count & (count - 1) == 0 and self._input is not None:  # 1, 2, 4, 8, ...
                self.slowest_stage = self._input.slowest_stage() or self.slowest_stage

    def _num_steps(self, first: int, last: int) -> int:
        """Of an execution; the last one of an epoch has fewer, which Keras does not tell."""
        epochs = self._fit.epoch_iterator
        batches = None if epochs.steps_per_epoch else epochs.num_batches
        return (min(last + 1, batches) if batches else last + 1) - first

    def _iterations(self) -> int:
        iterations = getattr(self._model.optimizer, "iterations", None)
        return 0 if iterations is None else int(iterations.numpy())

    def _measured(self, batches: Iterator | None) -> Iterator | None:
        """The iterator of a step with a clock at it; one of another kind as it is.

        So is one in whose graph a clock is refused.
        """
        if isinstance(batches, types.GeneratorType | BatchesAhead):
            return self._timed_batches(batches)
        if not isinstance(batches, tf.data.Iterator) or is_op_determinism_enabled():
            return batches
        if self._input is None:
            self._input = InputWait()
            self.clock.restart_counting()
        return self._input.around(batches)

    def _timed_batches(self, batches: Iterator) -> Iterator:
        """Batches that Python gives to one execution, one after the other."""
        clock, batches = self.clock, iter(batches)
        while True:
            began_s = clock.now()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                clock.epoch.spent.input_s += clock.now() - began_s
            yield batch

    # ---- callbacks -------------------------------------------------------------------------------

    def _time(self, callback: keras.callbacks.Callback) -> None:
        """Puts the clock around what Keras tells a callback."""
        name = type(callback).__name__

        def timed(original: Callable, *args: object, **kwargs: object) -> object:
            with self.clock.in_callback(name):
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
