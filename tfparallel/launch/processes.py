"""A group of worker processes that starts together, ends together and leaves nothing behind.

Who ends whom:

    a worker fails, Ctrl-C, SIGTERM  ->  as `job_life.py` decides, SIGTERM and later SIGKILL to each
                                         worker's process group, and to all others that carry the
                                         job's mark (leftovers.py)
    the launcher is killed           ->  the kernel kills the workers (die_with_launcher.py),
                                         the guard the rest (leftovers.py)
"""

import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from tfparallel.launch.failure import failure_report
from tfparallel.launch.job_life import (
    Ending,
    Event,
    Exited,
    JobLife,
    OutputEnded,
    Signalled,
)
from tfparallel.launch.leftovers import MARK_VARIABLE, marked_job, marked_pids
from tfparallel.launch.output import ByteStream, Outbox, Relay, label_prefix

_DIE_WITH_LAUNCHER = str(Path(__file__).with_name("die_with_launcher.py"))

# How long output may take to end after every process that we know of is dead.
_DRAIN_S = 1.0


@dataclass(frozen=True)
class WorkerCommand:
    """A process to run.

    Attributes:
        label: names it in the output, for example "worker 1".
        argv: the program and its arguments.
        env: its whole environment.
        cpus: the only ones it runs on; none for those that this process runs on.
        log: a file that gets all it writes, at its end; None for no file.
        is_shown: whether its output also goes to the launcher's.
    """

    label: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    log: Path | None = None
    is_shown: bool = True


def run_processes(
    commands: Sequence[WorkerCommand],
    *,
    grace_s: float = 10.0,
    stdout: ByteStream | None = None,
    stderr: ByteStream | None = None,
) -> int:
    """Run all commands at once; see `run_job`.

    Returns:
        0 if all commands returned 0. Otherwise the exit status of the command that failed first;
        128 + n if it was killed by signal n. If the launcher was told to stop by signal n, also
        128 + n.
    """
    return run_job(commands, grace_s=grace_s, stdout=stdout, stderr=stderr).status


def run_job(
    commands: Sequence[WorkerCommand],
    *,
    grace_s: float = 10.0,
    stdout: ByteStream | None = None,
    stderr: ByteStream | None = None,
) -> Ending:
    """Run all commands at once until all have ended, or one has failed.

    Linux only. Call it from the main thread if SIGINT, SIGTERM and SIGHUP are to stop the job;
    from another thread, they are left as they are.

    Args:
        commands: what to run; the position in this list is the rank.
        grace_s: how long processes may take to end after SIGTERM; 10 s, as for `docker stop`. A
            second Ctrl-C cuts it short.
        stdout, stderr: where labelled output goes; by default this process's own.
    """
    if not commands:
        raise ValueError("Expected at least one command to run. Received: none.")
    if grace_s < 0:
        raise ValueError(f"grace_s must be 0 or more. Received: {grace_s}.")
    events: _Events = queue.SimpleQueue()
    with Outbox(stdout, stderr) as outbox:
        with _signals_as_events(events), marked_job() as mark:
            group = _Group(commands, mark, events, outbox)
            life = JobLife(group, time.monotonic)
            ending = life.run(grace_s)
        group.drain()
        if (rank := ending.failed_rank) is not None:
            outbox.put(outbox.stderr, group.report_on(rank, life.returncodes[rank]))
    return ending


def wait_for_stop(timeout_s: float) -> int | None:
    """Waits while no job runs; returns the number of a signal that says to stop, if one comes."""
    events: _Events = queue.SimpleQueue()
    with _signals_as_events(events):
        try:
            event = events.get(timeout=timeout_s)
        except queue.Empty:
            return None
    assert isinstance(event, Signalled)
    return event.number


_Events = queue.SimpleQueue[Event]


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    watch: threading.Thread
    stdout_relay: Relay
    stderr_relay: Relay

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        return self.watch, self.stdout_relay, self.stderr_relay


class _Group:
    """The processes of one job; see `job_life.ProcessGroup`.

    All methods are for one thread; others only send events.
    """

    def __init__(
        self, commands: Sequence[WorkerCommand], mark: str, events: _Events, outbox: Outbox
    ):
        self._commands = commands
        self._mark = mark
        self._events = events
        self._outbox = outbox
        self.labels = [command.label for command in commands]
        self._workers: list[_Worker] = []

    def start(self) -> None:
        """Start every command, in a session and so a process group of its own."""
        for rank, command in enumerate(self._commands):
            cpus = ",".join(map(str, command.cpus))
            # -I -S: starts in 10 ms, as it loads nothing.
            wrapper = (sys.executable, "-I", "-S", _DIE_WITH_LAUNCHER, str(os.getpid()), cpus)
            process = subprocess.Popen(
                [*wrapper, *command.argv],
                env={**command.env, MARK_VARIABLE: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
            worker = _Worker(
                process,
                threading.Thread(target=self._watch, args=(rank, process.pid), daemon=True),
                stdout_relay=self._relay(rank, process.stdout, self._outbox.stdout),
                stderr_relay=self._relay(rank, process.stderr, self._outbox.stderr),
            )
            for thread in worker.threads:
                thread.start()
            self._workers.append(worker)

    def _relay(self, rank: int, pipe: IO[bytes] | None, stream: ByteStream) -> Relay:
        assert pipe is not None
        command = self._commands[rank]
        prefix = label_prefix(command.label, rank, stream)
        on_end = functools.partial(self._events.put, OutputEnded(rank))
        shown = stream if command.is_shown else None
        return Relay(pipe, self._outbox, shown, prefix, on_end, command.log)

    def _watch(self, rank: int, pid: int) -> None:
        # WNOWAIT leaves the dead process in place until `stop`. So long its pid, which is also
        # the id of its group, cannot pass to a stranger, and the group can be signalled safely.
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        was_killed = result.si_code != os.CLD_EXITED
        self._events.put(Exited(rank, -result.si_status if was_killed else result.si_status))

    def num_started(self) -> int:
        return len(self._workers)

    def next_event(self, timeout_s: float | None) -> Event | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def terminate(self) -> None:
        self._signal_groups(signal.SIGTERM)
        self._terminate_marked_outside_groups()

    def kill(self) -> None:
        self._signal_groups(signal.SIGKILL)
        for worker in self._workers:
            worker.watch.join()
            worker.process.wait()

    def is_any_left(self) -> bool:
        return bool(marked_pids(self._mark))

    def drain(self) -> None:
        """Wait for the last output of processes that are all dead.

        A process that has shed its group and its mark may still hold a pipe: give up on that. Do
        not give up while text is on its way to a reader that is merely slow.
        """
        for worker in self._workers:
            for relay in (worker.stdout_relay, worker.stderr_relay):
                relay.join(_DRAIN_S)
                while relay.is_alive() and not self._outbox.is_empty():
                    relay.join(_DRAIN_S)

    def report_on(self, rank: int, returncode: int) -> bytes:
        """The failure report for one worker; call after `drain`."""
        tail = tuple(self._workers[rank].stderr_relay.tail)
        return failure_report(self.labels[rank], returncode, tail)

    def _signal_groups(self, number: signal.Signals) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, number)

    def _terminate_marked_outside_groups(self) -> None:
        # One SIGTERM each: programs take a second one for impatience.
        groups = {worker.process.pid for worker in self._workers}
        for pid in marked_pids(self._mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) not in groups:
                    os.kill(pid, signal.SIGTERM)

    def note(self, text: str) -> None:
        self._outbox.put_if_room(self._outbox.stderr, f"[launcher] {text}\n".encode())


@contextlib.contextmanager
def _signals_as_events(events: _Events) -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into events, while in the context."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        events.put(Signalled(number))  # SimpleQueue.put is reentrant, so a handler may call it

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    # A launcher that was started with SIGCHLD ignored would never learn an exit status.
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
