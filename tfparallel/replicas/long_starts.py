"""What is said of a step whose first call takes long: that it is traced, optimised, and over.

Both take minutes for a large model on many replicas, in which nothing else is heard. What is said
is decided in plain Python, on times that are passed in, as in `coordination/patience.py`:

    the call begins         its function is traced           it is over
    | tracing               | optimising, running once       |
      INFO, once it has       INFO, once it has              INFO, if there was one before
      taken 15 s              taken 15 s
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tensorflow as tf

from tfparallel.coordination.patience import SAY_AFTER_S
from tfparallel.coordination.waiting import REAL, Clock
from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.graphs import call_that_traces
from tfparallel.internals.running_call import RunningCall


class LongStart:
    """The first call of one step.

    Args:
        what: is traced, for example "train_step of MirroredStrategy for 8 replicas".
        now_s: when the call begins.
        say_after_s: how long a part of it may take in silence.
    """

    def __init__(self, what: str, now_s: float, say_after_s: float = SAY_AFTER_S):
        self._what, self._say_after_s = what, say_after_s
        self._began_s = self._silent_since_s = now_s
        self._traced_s: float | None = None
        self._has_spoken = self._said_of_this_part = False

    def traces_again(self) -> None:
        """More of the function is traced, by the same call of it."""
        self._traced_s = None

    def is_traced(self, now_s: float) -> None:
        """The graph is there: the rest of the call is TensorFlow's."""
        self._traced_s = self._silent_since_s = now_s
        self._said_of_this_part = False

    def look(self, now_s: float) -> str | None:
        """What to say now; None for nothing."""
        is_long = now_s - self._silent_since_s >= self._say_after_s
        is_long |= not self._has_spoken and now_s - self._began_s >= self._say_after_s
        if self._said_of_this_part or not is_long:
            return None
        self._has_spoken = self._said_of_this_part = True
        if self._traced_s is None:
            return (
                f"Tracing {self._what} has taken {now_s - self._began_s:.0f} s so far. It happens "
                "once for each shape of a batch; what is traced is the model's Python code."
            )
        return (
            f"{self._what} has been traced, in {self._traced_s - self._began_s:.0f} s. For "
            f"{now_s - self._traced_s:.0f} s TensorFlow has been optimising the graph, and running "
            "it for the first time."
        )

    def last_words(self, now_s: float) -> str | None:
        """What to say when the call is over; None if nothing was said before."""
        if not self._has_spoken:
            return None
        traced_s = now_s if self._traced_s is None else self._traced_s
        return (
            f"The first call of {self._what} is over after {now_s - self._began_s:.0f} s: "
            f"{traced_s - self._began_s:.0f} s of tracing, {now_s - traced_s:.0f} s of optimising "
            "the graph and running it."
        )


@dataclass
class _CallUnderWay:
    """A call that is under way, and the thread that looks at it."""

    start: LongStart
    call: RunningCall | None  # None where Keras builds a model from shapes: nothing runs
    tracing: int = 1  # how many calls of `run` are being traced
    has_failed: bool = False

    def is_running(self) -> bool:
        return bool(self.tracing) or (self.call is not None and self.call.is_running())


_POLL_S = 1.0
_watched: list[_CallUnderWay] = []  # calls that are under way
_guard = threading.Lock()


@contextlib.contextmanager
def spoken_of(
    strategy: tf.distribute.Strategy,
    function: Callable,
    clock: Clock = REAL,
    say_after_s: float | None = None,
) -> Iterator[None]:
    """Within it, `strategy.run` calls `function` on replicas; says so if it traces for long.

    Args:
        strategy: whose chief says it, for all.
        function: is named.
        clock: whose time it is, and who is told.
        say_after_s: see `LongStart`; None is `SAY_AFTER_S`.
    """
    if tf.executing_eagerly() or not strategy.is_chief:
        yield
        return
    watched = _begin(strategy, function, clock, say_after_s or SAY_AFTER_S)
    try:
        yield
    except BaseException:
        watched.has_failed = True  # the error says what has happened
        raise
    finally:
        with _guard:
            watched.tracing -= 1
            if not watched.tracing:
                watched.start.is_traced(clock.now_s())


def _begin(
    strategy: tf.distribute.Strategy, function: Callable, clock: Clock, say_after_s: float
) -> _CallUnderWay:
    """The call that is under way, of which this is a part, or one that begins."""
    call = call_that_traces()
    with _guard:
        for known in _watched:
            if call is not None and known.call == call:
                known.tracing += 1
                known.start.traces_again()
                return known
        start = LongStart(_described(strategy, function), clock.now_s(), say_after_s)
        watched = _CallUnderWay(start, call)
        _watched.append(watched)
    poll_s = min(_POLL_S, say_after_s / 4)
    thread = threading.Thread(
        target=_look, args=(watched, clock, poll_s), name="tfparallel-long-start", daemon=True
    )
    thread.start()
    return watched


def _look(watched: _CallUnderWay, clock: Clock, poll_s: float) -> None:
    """Looks at a call until it is over; a thread of its own does it, as the call's is busy."""
    while watched.is_running():
        _say(clock, watched.start.look)
        clock.sleep(poll_s)
    with _guard:
        _watched.remove(watched)
    if not watched.has_failed:
        _say(clock, watched.start.last_words)


def _say(clock: Clock, words: Callable[[float], str | None]) -> None:
    with _guard:
        text = words(clock.now_s())
    if text is not None:
        clock.say(logging.INFO, text)


def _described(strategy: tf.distribute.Strategy, function: Callable) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    replicas = num_replicas(strategy)
    many = f" for {replicas} replicas" if replicas > 1 else ""
    return f"{name} of {type(strategy).__name__}{many}"
