"""A world in which one thread runs at a time, and who is next is drawn.

What is simulated runs in real threads, which hand one another the right to run. A thread hands it
on only where it asks its machine for something (a lock, a file, a message, sleep), so each schedule
is determined by the numbers that were drawn.

A process can be killed (each of its threads raises `Killed` at its next request, and cannot do
anything any more), stopped for a while, and its clock can jump. Time passes only while everybody
waits, and a little with each request.
"""

import functools
import heapq
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulation.choices import Choices
from tfparallel.coordination.machine import Machine

REQUEST_S = 0.001  # what a request takes
MOST_REQUESTS = 60_000  # of a schedule; one that goes on longer goes round in circles


class Killed(BaseException):
    """This process does not exist any more."""


# What is played is not what the package's code asks for any more: no process ends so.
MISTAKES = (AssertionError, AttributeError, LookupError, NameError, NotImplementedError, TypeError)


class Violation(AssertionError):
    """Something happened that must never happen."""


class Process:
    """A process of the simulated world.

    Attributes:
        name, pid, host: who and where it is.
        is_dead: whether it was killed, or has ended.
        stopped_until_s: a stopped process runs again then.
        clock_s: what its clock is ahead.
        was_stopped_s: for how long, in all.
        said: what it has logged.
        error: with which it ended.
    """

    def __init__(self, world: "World", name: str, host: str):
        self.world, self.name, self.host = world, name, host
        self.pid = next(world.pids)
        self.is_dead = self.has_ended = False
        self.stopped_until_s = self.clock_s = self.was_stopped_s = 0.0
        self.threads: list[_Thread] = []
        self.at_end: list[Callable[[], None]] = []
        self.said: list[tuple[float, int, str]] = []
        self.error: BaseException | None = None
        self.machine = Machine(
            now_s=self._now_s,
            sleep=world.sleep,
            say=lambda level, text: self.said.append((world.now_s, level, text)),
            changes=lambda: Changes(world),
            start=functools.partial(world.start, self),
        )

    def _now_s(self) -> float:
        return self.world.now_s + self.clock_s

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run any more."""
        return self.is_dead or self.has_ended


class World:
    """Where processes run.

    Args:
        choices: decide.
        limit_s: of the simulated clock: who still waits then waits for too long.
    """

    def __init__(self, choices: Choices, limit_s: float = 10_000.0):
        self.choices, self._limit_s = choices, limit_s
        self.now_s = 0.0
        self.pids = itertools.count(100)
        self.processes: list[Process] = []
        self.before_request: Callable[[Process], None] = lambda process: None
        self.log: list[str] = []
        self._threads: list[_Thread] = []
        self._current: _Thread | None = None
        self._is_over = threading.Lock()
        self._num_requests = 0
        self.violation: BaseException | None = None
        self.switch_chance = 0.1
        self._looks_s: list[float] = []
        self.is_told = False  # whether each step is noted

    # ---- from outside ----------------------------------------------------------------------------

    def process(self, name: str, main: Callable[[Process], Any], host: str = "") -> Process:
        """Starts a process; it ends with `main`, and takes its other threads with it."""
        process = Process(self, name, host or name)
        self.processes.append(process)

        def run() -> None:
            try:
                main(process)
            except MISTAKES as error:
                self.fail(Violation(f"{name} is played wrongly: {error!r}"))
            except Exception as error:
                process.error = error
            except SystemExit as error:
                process.error = error
            for thread in [
                t for t in process.threads if t.is_waited_for and t is not self._current
            ]:
                thread.handle.join()
            self.end(process)

        self.start(process, run, f"{name} main")
        return process

    def run(self) -> None:
        """Runs until all processes have ended.

        Raises:
            Violation: what was raised or found in any thread.
        """
        self._is_over.acquire()
        self._hand_on(None)
        self._is_over.acquire()
        if self.violation is not None:
            raise self.violation

    # ---- for processes ---------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Something that a person wants to know of a failing schedule."""
        self.log.append(
            f"{self.now_s:9.3f} {self.me.process.name if self._current else '-'}: {text}"
        )

    @property
    def me(self) -> "_Thread":
        """The thread that runs."""
        assert self._current is not None
        return self._current

    def start(
        self, process: Process, target: Callable[[], None], name: str, is_daemon: bool = True
    ) -> "_Handle":
        """A thread of a process."""
        thread = _Thread(self, process, target, name)
        thread.is_waited_for = not is_daemon
        process.threads.append(thread)
        self._threads.append(thread)
        return thread.handle

    def request(self) -> None:
        """Time passes, and anything may happen."""
        thread = self.me
        if thread.process.is_dead:
            raise Killed
        self._num_requests += 1
        self.now_s += REQUEST_S
        if self._num_requests > MOST_REQUESTS or self.now_s > self._limit_s:
            self.fail(Violation(f"still running at {self.now_s:.0f} s: {self.described()}"))
        self.before_request(thread.process)
        if thread.process.is_dead:
            raise Killed
        if self.choices.rarely(self.switch_chance) or self.now_s < thread.process.stopped_until_s:
            self._hand_on(thread)

    def sleep(self, seconds: float) -> None:
        """The thread that runs does not, for so long."""
        self.wait(lambda: False, seconds)

    def wait(self, is_ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """The thread that runs does not until `is_ready()`, or for so long; which it was."""
        self.request()
        thread = self.me
        limit_s = math.inf if seconds is None else self.now_s + max(0.0, seconds)
        if not is_ready():
            thread.is_ready, thread.until_s = is_ready, limit_s
            self._hand_on(thread)
            thread.is_ready = None
        return is_ready()

    def look_at(self, time_s: float) -> None:
        """Somebody who waits may be ready then, though no other thread has done anything."""
        heapq.heappush(self._looks_s, time_s)

    def stop(self, process: Process, seconds: float) -> None:
        """A process does nothing for so long, as by SIGSTOP."""
        process.stopped_until_s = self.now_s + seconds
        process.was_stopped_s += seconds

    def wake(self, chance: float) -> None:
        """A stopped process, if there is one, may run again now, and not when its time is over."""
        for process in self.processes:
            is_stopped = not process.is_over and self.now_s < process.stopped_until_s
            if is_stopped and self.choices.rarely(chance):
                process.stopped_until_s = self.now_s
                self._hand_on(self.me)

    def kill(self, process: Process) -> None:
        """Ends a process as `kill -9` does."""
        self.end(process)
        if self._current is not None and process is self.me.process:
            raise Killed

    def end(self, process: Process) -> None:
        """A process is over: its threads do nothing any more."""
        if not process.is_dead:
            process.is_dead = True
            for action in process.at_end:
                action()

    def fail(self, error: BaseException) -> None:
        """Ends the world."""
        if self.violation is None:
            self.violation = error
        for process in self.processes:
            process.is_dead = True
        if self._current is not None:
            raise Killed

    def described(self) -> str:
        """Who waits, in words."""
        return ", ".join(t.name for t in self._threads if not t.process.is_dead)

    # ---- who is next -----------------------------------------------------------------------------

    def _hand_on(self, thread: "_Thread | None") -> None:
        """Lets another thread run; returns when this one is to run again, or has ended."""
        following = self._next(thread)
        if following is thread and following is not None:
            return
        if following is None:
            self._is_over.release()
            return
        self._current = following
        following.resume()
        if thread is not None and not thread.has_ended:
            thread.pause()

    def _next(self, thread: "_Thread | None") -> "_Thread | None":
        while True:
            self._threads = [t for t in self._threads if not t.has_ended]
            if not self._threads:
                return None
            ready = [t for t in self._threads if t.may_run(self.now_s)]
            if ready:
                return ready[self.choices.below(len(ready))] if len(ready) > 1 else ready[0]
            wakes_s = min(t.wakes_s() for t in self._threads)
            while self._looks_s and min(wakes_s, self._looks_s[0]) == self._looks_s[0]:
                look_s = heapq.heappop(self._looks_s)
                if look_s > self.now_s:
                    wakes_s = look_s
                    break
            if math.isinf(wakes_s):
                waiting = self.described()
                if self.violation is None:
                    self.violation = Violation(f"all wait for ever: {waiting}")
                for process in self.processes:
                    process.is_dead = True
            else:
                self.now_s = max(self.now_s, wakes_s) + 1e-9


class _Thread:
    """A real thread that runs only while it is its turn."""

    def __init__(self, world: World, process: Process, target: Callable[[], None], name: str):
        self.world, self.process, self.name = world, process, name
        self.is_ready: Callable[[], bool] | None = None
        self.until_s = math.inf
        self.has_ended = self.is_waited_for = False
        self._target = target
        self._turn = threading.Lock()
        self._turn.acquire()
        self._has_begun = False
        self.handle = _Handle(self)

    def may_run(self, now_s: float) -> bool:
        if self.process.is_dead:
            return True
        if now_s < self.process.stopped_until_s:
            return False
        return self.is_ready is None or now_s >= self.until_s or self.is_ready()

    def wakes_s(self) -> float:
        wakes_s = self.until_s if self.is_ready is not None and not self.is_ready() else 0.0
        return max(wakes_s, self.process.stopped_until_s)

    def resume(self) -> None:
        if self._has_begun:
            self._turn.release()
        else:
            self._has_begun = True
            _POOL.run(self._run)

    def pause(self) -> None:
        self._turn.acquire()
        if self.process.is_dead:
            raise Killed

    def _run(self) -> None:
        try:
            if not self.process.is_dead:
                self._target()
        except Killed:
            pass
        except BaseException as error:  # what a simulated process does not catch
            if self.world.violation is None:
                self.world.violation = error
            for process in self.world.processes:
                process.is_dead = True
        self.has_ended = True
        self.world._hand_on(self)


class _Handle:
    """What `Machine.start` gives."""

    def __init__(self, thread: _Thread):
        self._thread = thread

    def join(self, timeout: float | None = None) -> None:
        self._thread.world.wait(lambda: self._thread.has_ended, timeout)

    def is_alive(self) -> bool:
        return not self._thread.has_ended


class Changes:
    """`threading.Condition` of a simulated process."""

    def __init__(self, world: World):
        self._world, self._owner, self._depth = world, None, 0
        self._news = 0

    def __enter__(self) -> "Changes":
        world = self._world
        if self._owner is world._current:
            self._depth += 1
            return self
        world.wait(lambda: self._owner is None)
        self._owner, self._depth = world.me, 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None

    def wait(self, timeout: float | None = None) -> bool:
        seen = self._news
        return self.wait_for(lambda: self._news != seen, timeout)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if predicate():
            return True
        world, depth = self._world, self._depth
        until_s = math.inf if timeout is None else world.now_s + timeout
        while True:
            seen, self._owner, self._depth = self._news, None, 0
            try:
                left_s = until_s - world.now_s
                world.wait(lambda seen=seen: self._news != seen, left_s)
                world.wait(lambda: self._owner is None)
            finally:
                self._owner, self._depth = world._current, depth
            if predicate() or world.now_s >= until_s:
                return predicate()

    def notify_all(self) -> None:
        self._news += 1


class _Pool:
    """Real threads that are used again: starting one takes as long as a short schedule."""

    def __init__(self) -> None:
        self._idle: list[_PoolThread] = []

    def run(self, function: Callable[[], None]) -> None:
        thread = self._idle.pop() if self._idle else _PoolThread(self)
        thread.run(function)

    def is_idle(self, thread: "_PoolThread") -> None:
        self._idle.append(thread)


class _PoolThread:
    def __init__(self, pool: _Pool):
        self._pool, self._work = pool, threading.Lock()
        self._work.acquire()
        self._function: Callable[[], None] = lambda: None
        threading.Thread(target=self._serve, daemon=True).start()

    def run(self, function: Callable[[], None]) -> None:
        self._function = function
        self._work.release()

    def _serve(self) -> None:
        for _ in self._turns():
            self._function()
            self._pool.is_idle(self)

    def _turns(self) -> Iterator[None]:
        while True:
            self._work.acquire()
            yield


_POOL = _Pool()
