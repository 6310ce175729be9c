"""Runs each check in a process of its own, which ends in time, whatever happens in it.

A process is a new one, or a fork of one that has imported TensorFlow and done nothing with it: what
most of a short check would take, on few cores. So are the processes of jobs, then (`forks.py`).
Forks of what has opened GPUs cannot use them.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from multiprocessing.process import BaseProcess

from tfparallel.selftest.catalogue import REFERENCE, Check, why_not
from tfparallel.selftest.forks import listen_for_forks, serve_forks
from tfparallel.selftest.job_checks import outcomes_in
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.one_check import main, write_to
from tfparallel.selftest.verdicts import Outcome

_KEPT_CHARACTERS = 4000  # of the output of a check that failed
_END_S = 10.0
_FRESH, _FORKED = multiprocessing.get_context("spawn"), multiprocessing.get_context("forkserver")
_IMPORTS = ["tfparallel.selftest.preloaded"]


async def run_checks(
    checks: Sequence[Check], bench: Bench, at_once: int, is_forked: bool
) -> AsyncIterator[tuple[Check, Outcome]]:
    """Each check with its end, as they end.

    Args:
        checks: in the order in which they begin, but that some wait for the reference.
        bench: where they run.
        at_once: how many run side by side.
        is_forked: whether their processes are forks, and those of their jobs.
    """
    room = asyncio.Semaphore(at_once)
    has_reference = asyncio.Event()

    async def run(check: Check) -> tuple[Check, Outcome]:
        if check.needs_reference:
            await has_reference.wait()
        async with room:
            outcome = await run_check(check, bench, is_forked)
        if check is REFERENCE:
            has_reference.set()
        return check, outcome

    with _server(bench) if is_forked else contextlib.nullcontext():
        tasks = [asyncio.create_task(run(check)) for check in checks]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _server(bench: Bench) -> Iterator[None]:
    """Serves forks to the processes of jobs."""
    multiprocessing.set_forkserver_preload(_IMPORTS)
    with listen_for_forks(bench.folder) as listener:
        server = _FORKED.Process(target=serve_forks, args=(listener, main))
        server.start()
    try:
        yield
    finally:
        _end(server)
        server.join()


async def run_check(check: Check, bench: Bench, is_forked: bool = False) -> Outcome:
    """One check, with its limit; all processes that it started end with it."""
    if reason := why_not(check, len(bench.gpus)):
        return Outcome(check.name, "skipped", reason)
    multiprocessing.set_forkserver_preload(_IMPORTS)
    new_process = _FORKED.Process if is_forked else _FRESH.Process
    output = bench.path / f"{check.name}.txt"
    output.touch()
    begin = time.monotonic()
    process = new_process(
        target=write_to, args=(output, bench.to_json(), check.function, *check.arguments)
    )
    process.start()
    try:
        await asyncio.to_thread(process.join, check.limit_s)
        status = process.exitcode
    finally:
        _end(process)
        await asyncio.to_thread(process.join, _END_S)  # one that a driver holds cannot end
    text = output.read_text(errors="replace")
    return outcome_of(check, status, text, time.monotonic() - begin)


def outcome_of(check: Check, status: int | None, output: str, seconds: float) -> Outcome:
    """How a process says that its check ended, or that it did not come to say.

    Args:
        check: that ran.
        status: its exit status, -n by signal n; None where it was ended at its limit.
        output: all that its processes wrote.
        seconds: that it took.
    """
    said = outcomes_in(output)
    seconds = round(seconds, 1)
    if status is not None and status >= 0 and said:
        verdict, found, figures = (said[-1][key] for key in ("verdict", "found", "figures"))
    else:
        verdict, found, figures = "failed", _why(check, status), {}
    failed = verdict == "failed"
    return Outcome(
        check.name,
        verdict,
        found,
        seconds,
        check.cure if failed else "",
        output[-_KEPT_CHARACTERS:] if failed else "",
        figures,
    )


def _why(check: Check, status: int | None) -> str:
    if status is None:
        return f"no end after {check.limit_s:g} s"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status} before it could say how it ended"


def _end(process: BaseProcess) -> None:
    """Ends what is left of a check, or of forks: their session, or who has not come to make one."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
