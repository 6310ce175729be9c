"""The clock of one training: what is measured of each step and added up for each epoch.

It is told when a step begins and ends, when callbacks run, and asked at the end of an epoch. It
knows neither Keras nor TensorFlow; what it reads besides the time is passed in.
"""

import contextlib
import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tfparallel.communication.link_times import NO_LINKS, LinkTimes
from tfparallel.measure.record import StepTimes, step_times
from tfparallel.measure.shares import Spent

_SHORT_S = 1e-4  # what passes between two steps is Python, then: no system call is made for it
_UNUSUAL = 2.0  # times the median: then it is looked up what a step has waited for
_TOGETHER = 64  # steps are added up: after each one it took ten times as long, as caches are cold


@dataclass(frozen=True)
class Sources:
    """What is read at the beginning and the end of each step.

    Attributes:
        links: what collectives have taken so far.
        traces: how often the step has been traced so far.
        waited_s: at the iterator, so far; asked seldom.
        rows: that have come out of it so far; asked seldom. None where that is not known.
        splits_python: whether the main thread computes nothing of a step but Python.
    """

    links: Callable[[], LinkTimes]
    traces: Callable[[], int]
    waited_s: Callable[[], float]
    rows: Callable[[], int | None]
    splits_python: bool = True


@dataclass(slots=True)
class _Step:
    started_s: float
    python_s: float
    links: LinkTimes
    callbacks_s: float = 0.0
    callbacks_python_s: float = 0.0


# A step, how many were executed together, and what was read at their end: the time, what the thread
# had computed, links and traces. Plain, as it is made in each step.
_Ended = tuple[_Step, int, float, float, LinkTimes, int]


@dataclass
class Epoch:
    """What has been measured since it began.

    Attributes:
        spent: sums of seconds.
        times_s: of steps that traced nothing; those that are executed together take alike.
        traced_s: of those that did.
        own_s: of executions that traced nothing, without callbacks and waiting for collectives.
        traced: of those that traced: the same, without waiting for data as well, and what the main
            thread computed.
        rows: None where that is not known.
        links: what collectives did within the steps.
        traces: how many.
        longest_s: the largest of `times_s`.
        because: why that step took so long.
    """

    started_s: float
    waited_s: float
    first_row: int | None
    spent: Spent = field(default_factory=Spent)
    times_s: list[float] = field(default_factory=list)
    traced_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    traced: list[tuple[float, float]] = field(default_factory=list)
    rows: int | None = None
    links: LinkTimes = LinkTimes()
    traces: int = 0
    longest_s: float = 0.0
    because: str = ""

    @property
    def num_steps(self) -> int:
        """All that were done."""
        return len(self.times_s) + len(self.traced_s)

    def tracing_s(self) -> float:
        """What steps that traced took longer than others, at least what the main thread computed.

        More than that: graphs are optimised on other threads, and the thread may have to wait.
        """
        if not self.own_s:
            return sum(python_s for _, python_s in self.traced)
        usual_s = statistics.median(self.own_s)
        return sum(max(python_s, own_s - usual_s) for own_s, python_s in self.traced)

    def step_times(self) -> StepTimes:
        """Of steps that traced nothing, if there were any."""
        if self.times_s:
            return step_times(self.times_s, self.because)
        return step_times(self.traced_s, "tracing")


class TrainingClock:
    """Adds up what one training spends; of its main thread only.

    Args:
        sources: what is read besides the time.
        now: seconds by a clock that never goes back.
        python_now: seconds that this thread has computed.

    Attributes:
        epoch: that goes on.
        now: as told.
    """

    def __init__(
        self,
        sources: Sources,
        now: Callable[[], float] = time.perf_counter,
        python_now: Callable[[], float] = time.thread_time,
    ):
        self._sources, self.now, self._python_now = sources, now, python_now
        self._thread = threading.get_ident()
        self._step: _Step | None = None
        self._ended: list[_Ended] = []  # and not added up yet
        self._ended_s, self._ended_python_s = -math.inf, 0.0  # the last step
        self._ended_links = NO_LINKS
        self._depth = 0  # of callbacks: one that calls another is counted once
        self._validating_s: float | None = None
        self._is_validated = False
        self._usual_s = 0.0
        self._num_traces = sources.traces()
        self.epoch = self._new_epoch(now())

    def end_epoch(self) -> Epoch:
        """What was measured since the last call, or since the training began."""
        self._leave_validation()
        self._add_up()
        now, ended = self.now(), self.epoch
        waited_s = self._sources.waited_s()
        ended.spent.wall_s = now - ended.started_s
        ended.spent.tracing_s = ended.tracing_s()
        ended.spent.input_s += waited_s - ended.waited_s
        rows = self._sources.rows()
        if rows is not None and ended.first_row is not None:
            ended.rows = rows - ended.first_row
        self.epoch = self._new_epoch(now)
        return ended

    def so_far(self) -> Spent:
        """What the epoch that goes on has spent, at this moment."""
        self._add_up()
        epoch = self.epoch
        waited_s = self._sources.waited_s() - epoch.waited_s
        return dataclasses.replace(
            epoch.spent,
            wall_s=self.now() - epoch.started_s,
            input_s=epoch.spent.input_s + waited_s,
            tracing_s=epoch.tracing_s(),
        )

    def _new_epoch(self, now: float) -> Epoch:
        self._last_wait_s, self._steps_since_asked = self._sources.waited_s(), 0
        return Epoch(now, self._last_wait_s, self._sources.rows())

    # ---- steps -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Keras has its batches, or will ask for them now."""
        now = self.now()
        between_s = now - self._ended_s
        if between_s < _SHORT_S:
            self._step = _Step(now, self._ended_python_s + between_s, self._ended_links)
        else:
            self._step = _Step(now, self._python_now(), self._sources.links())

    def enter_first_step(self) -> None:
        """Keras tells callbacks of an epoch's first step.

        Before that it lets go of the iterator of the epoch before.
        """
        step, epoch = self._step, self.epoch
        if step is None:
            return
        waited_s = self.now() - step.started_s - step.callbacks_s
        epoch.spent.iterators_s += waited_s
        step.started_s += waited_s

    def end_step(self, num_steps: int = 1) -> None:
        """Keras asks for the next step.

        Args:
            num_steps: that were executed together.
        """
        step, sources = self._step, self._sources
        assert step is not None
        self._step = None
        self._ended_s, self._ended_python_s = now, python_s = self.now(), self._python_now()
        self._ended_links = links = sources.links()
        traces = sources.traces()
        self._ended.append((step, num_steps, now, python_s, links, traces))
        is_unusual = now - step.started_s >= _UNUSUAL * self._usual_s * num_steps
        if is_unusual or traces != self._num_traces or len(self._ended) == _TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        """What has ended; a step that has traced, or has taken long, at once."""
        for each in self._ended:
            self._add(*each)
        self._ended.clear()

    def _add(
        self,
        step: _Step,
        num_steps: int,
        ended_s: float,
        ended_python_s: float,
        ended_links: LinkTimes,
        num_traces: int,
    ) -> None:
        epoch, spent = self.epoch, self.epoch.spent
        took_s = ended_s - step.started_s
        python_s = max(0.0, ended_python_s - step.python_s - step.callbacks_python_s)
        links = NO_LINKS if ended_links == step.links else ended_links.since(step.links)
        own_s = took_s - step.callbacks_s
        self._steps_since_asked += 1
        traces, self._num_traces = num_traces - self._num_traces, num_traces
        spent.steps_s += took_s
        if links is not NO_LINKS:
            own_s -= links.stalled_s
            spent.linked_s += links.stalled_s
            spent.waited_s += links.waited_s
            epoch.links = epoch.links.plus(links)
        if traces or not self._usual_s:  # the first one also where traces cannot be counted
            epoch.traces += max(1, traces)
            epoch.traced_s += [took_s / num_steps] * num_steps
            waited_s, num_executions = self._waited_since_last_asked()
            epoch.traced.append((own_s - waited_s / num_executions, python_s))
            self._usual_s = self._usual_s or took_s / num_steps
            return
        each_s = took_s / num_steps
        epoch.times_s += [each_s] * num_steps
        epoch.own_s.append(own_s)
        if self._sources.splits_python:
            spent.python_s += python_s
        if len(epoch.own_s) % 64 == 1:
            self._usual_s = statistics.median(epoch.times_s[-256:])
        if each_s >= epoch.longest_s:
            epoch.longest_s = each_s
            if each_s >= _UNUSUAL * self._usual_s:
                self._look_up(step, took_s, python_s, links)

    def _look_up(self, step: _Step, took_s: float, python_s: float, links: LinkTimes) -> None:
        """Why a step took longer than any before, by far."""
        causes = {
            "input": self._waited_since_last_asked()[0],
            "callbacks": step.callbacks_s,
            "communication": links.stalled_s - links.waited_s,
            "waiting for another rank": links.waited_s,
            "Python": python_s,
        }
        largest = max(causes, key=causes.__getitem__)
        self.epoch.because = largest if causes[largest] > took_s / 4 else "compute"

    def _waited_since_last_asked(self) -> tuple[float, int]:
        """For data, and in how many steps."""
        before_s, num_steps = self._last_wait_s, self._steps_since_asked
        self._last_wait_s, self._steps_since_asked = self._sources.waited_s(), 0
        return max(0.0, self._last_wait_s - before_s), num_steps

    def forget_step(self) -> None:
        """A step that was begun was none: it was left out, or the data had ended."""
        self._step = None

    # ---- beside the steps ------------------------------------------------------------------------

    def restart_counting(self) -> None:
        """The counters of rows and waiting are there, and stand at zero."""
        self.epoch.waited_s, self.epoch.first_row = self._sources.waited_s(), self._sources.rows()
        self._last_wait_s, self._steps_since_asked = self.epoch.waited_s, 0

    @contextlib.contextmanager
    def in_callback(self, name: str) -> Iterator[None]:
        """Within it, the callback `name` runs; those of another thread, and of validation, not."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._leave_validation()
        if self._validating_s is not None or self._depth:
            yield
            return
        began, python_s = self.now(), self._python_now()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            took_s, step = self.now() - began, self._step
            spent = self.epoch.spent
            seconds = spent.outside_s if step is None else spent.callbacks_s
            seconds[name] = seconds.get(name, 0.0) + took_s
            if step is not None:
                step.callbacks_s += took_s
                step.callbacks_python_s += self._python_now() - python_s

    def begin_validation(self) -> None:
        """Until `end_validation`, time goes there."""
        self._validating_s = self.now()

    def end_validation(self) -> None:
        """Of an epoch's end, within `fit`: what Keras does before the next callback belongs to it.

        It lets go of the iterator, which takes TensorFlow up to half a second.
        """
        self._is_validated = self._validating_s is not None

    def _leave_validation(self) -> None:
        if self._is_validated:
            assert self._validating_s is not None
            self.epoch.spent.validation_s += self.now() - self._validating_s
            self._validating_s, self._is_validated = None, False
