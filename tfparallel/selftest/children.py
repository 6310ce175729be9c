"""Runs each check in a process of its own, which ends in time, whatever happens in it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence

from tfparallel.selftest.catalogue import Check, why_not
from tfparallel.selftest.job_checks import outcomes_in
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.verdicts import Outcome

_KEPT_CHARACTERS = 4000  # of the output of a check that failed
_END_S = 10.0


async def run_checks(
    checks: Sequence[Check], bench: Bench, at_once: int
) -> AsyncIterator[tuple[Check, Outcome]]:
    """Each check with its end, as they end.

    Args:
        checks: in the order in which they begin.
        bench: where they run.
        at_once: how many run side by side.
    """
    room = asyncio.Semaphore(at_once)

    async def run(check: Check) -> tuple[Check, Outcome]:
        async with room:
            return check, await run_check(check, bench)

    tasks = [asyncio.create_task(run(check)) for check in checks]
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_check(check: Check, bench: Bench) -> Outcome:
    """One check, with its limit; all processes that it started end with it."""
    if reason := why_not(check, len(bench.gpus)):
        return Outcome(check.name, "skipped", reason)
    module = "tfparallel.selftest.one_check"
    begin = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, bench.to_json(), check.function, *check.arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=bench.environment(),
        start_new_session=True,
    )
    output = bytearray()
    try:
        await asyncio.wait_for(_read(process, output), check.limit_s)
        status: int | None = process.returncode
    except asyncio.TimeoutError:
        status = None
    finally:
        _end(process)
        with contextlib.suppress(asyncio.TimeoutError):  # one that a driver holds cannot end
            await asyncio.wait_for(process.wait(), _END_S)
    text = output.decode(errors="replace")
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


async def _read(process: asyncio.subprocess.Process, output: bytearray) -> None:
    assert process.stdout is not None
    while chunk := await process.stdout.read(65536):
        output += chunk
    await process.wait()


def _end(process: asyncio.subprocess.Process) -> None:
    """Ends what is left of a check: the session that it was started in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
