"""Checks of jobs of several processes: the launcher starts them, each is a check of its own."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from tfparallel.logical_devices import LOGICAL_CPUS_VARIABLE
from tfparallel.machine.gpu_shares import VISIBLE
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.one_check import MARK
from tfparallel.selftest.verdicts import CheckFailedError, CheckSkippedError, Passed

ALONE = [sys.executable, "-m"]  # starts a module in one process, with all devices
_ONE_CHECK = "tfparallel.selftest.one_check"  # the module of each process
_STAND_IN_WORKERS = 2


def train_by_launcher(bench: Bench, name: str, *options: str) -> Passed:
    """A strategy whose processes `tfparallel launch` starts, one for each GPU."""
    return _train(launcher(bench, *options), bench, name)


def train_by_horovodrun(bench: Bench, name: str) -> Passed:
    """A strategy whose ranks `horovodrun` starts, one for each GPU."""
    return _train(horovodrun(bench), bench, name)


def compress(bench: Bench) -> Passed:
    """Every compressor over all workers: finite, and the same bits on all of them."""
    workers = _num_processes(bench)
    found = outcomes_of(launcher(bench), bench, "task_checks:train_compressed")
    digests = {json.dumps(each["figures"], sort_keys=True) for each in found}
    if len(found) != workers or len(digests) != 1:
        raise CheckFailedError(f"{len(found)} of {workers} workers ended, weights {digests}")
    return Passed(f"{len(found[0]['figures'])} compressors, equal bits on {workers} workers")


def _train(start: list[str], bench: Bench, name: str) -> Passed:
    found = outcomes_of(start, bench, "exactness_checks:train_as_task", name)
    if not found:
        raise CheckFailedError("no process of the job said how it ended")
    return Passed(f"processes: {len(found)}; {found[0]['found']}", found[0]["figures"])


def launcher(bench: Bench, *options: str) -> list[str]:
    """What starts a module by `tfparallel launch` in a process for each GPU."""
    workers = str(_num_processes(bench))
    launch = ["-m", "tfparallel", "launch", "--standalone", "--workers", workers, *options, "-m"]
    return [sys.executable, *launch]


def horovodrun(bench: Bench) -> list[str]:
    """What starts a module by `horovodrun` in a process for each GPU.

    Without GPUs by Gloo, which is always built: to find out imports TensorFlow another time.

    Raises:
        CheckSkippedError: without Horovod.
    """
    by = [] if bench.gpus else ["--gloo"]
    return [command_of_horovod(), *by, "-np", str(_num_processes(bench)), sys.executable, "-m"]


def command_of_horovod() -> str:
    """The path of `horovodrun`.

    Raises:
        CheckSkippedError: without Horovod.
    """
    if importlib.util.find_spec("horovod") is None:
        raise CheckSkippedError("Horovod is not installed: python -m tfparallel.build_horovod")
    return str(Path(sys.executable).with_name("horovodrun"))


def _num_processes(bench: Bench) -> int:
    return max(len(bench.gpus), _STAND_IN_WORKERS)


def outcomes_of(start: list[str], bench: Bench, function: str, *arguments: str) -> list[dict]:
    """What the processes of a job say; their output is this process's too.

    Args:
        start: what starts a module in each process, or `ALONE`.
        bench: where they run.
        function: "module:function" of this room.
        arguments: of the function, after the bench.

    Raises:
        CheckFailedError: if one of them failed, or the job did.
    """
    command = [*start, _ONE_CHECK, bench.to_json(), function, *arguments]
    environment = bench.environment()
    if start != ALONE:
        environment.pop(LOGICAL_CPUS_VARIABLE, None)  # a device for each
    if not bench.gpus:
        environment[VISIBLE] = "-1"
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=os.getcwd()
    )
    assert job.stdout is not None
    lines = []
    for line in job.stdout:
        lines.append(line)
        print(line, end="", flush=True)
    status = job.wait()
    found = outcomes_in("".join(lines))
    for each in found:
        if each["verdict"] == "failed":
            raise CheckFailedError(each["found"])
    if status != 0:
        raise CheckFailedError(f"exit status {status} of {command[0]}; its output says why")
    return found


def outcomes_in(output: str) -> list[dict]:
    """What processes of checks said, from all lines of a job's output."""
    parts = [line.partition(MARK)[2] for line in output.splitlines()]
    return [json.loads(part) for part in parts if part.startswith("{")]


def digest_of_bytes(parts: list[bytes]) -> str:
    """One short name for so many bytes."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
