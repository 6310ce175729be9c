"""A function run by several workers, from a notebook: `tfparallel.launch.notebook`."""

import importlib
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tfparallel.launch.ports import REUSE_PORT_ENV, reserved_addresses
from tfparallel.launch.processes import WorkerCommand, run_job
from tfparallel.launch.roles import WORKER, plan_processes

_WORKER = str(Path(__file__).with_name("run_pickled.py"))


class _Cell:
    """The output of a notebook's cell, which is no file: what `print` there writes to."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, data: bytes | memoryview, /) -> int:
        self._stream.write(bytes(data).decode(errors="replace"))
        self._stream.flush()
        return len(data)

    def fileno(self) -> int:
        raise io.UnsupportedOperation("a cell has no file descriptor")

    def isatty(self) -> bool:
        return False


def notebook(
    function: Callable,
    *args: object,
    workers: int = 2,
    devices_per_worker: int | None = None,
    **kwargs: object,
) -> list:
    """Calls `function(*args, **kwargs)` in each of several workers of one cluster.

    Each is a process of its own, with `TF_CONFIG` set: the function makes a
    `MultiWorkerMirroredStrategy`. It sees nothing of this process but what it is given, so it
    imports what it needs. What it prints appears here, line by line with its worker's name.

    Args:
        function: what to run, also of a notebook's cell; cloudpickle takes it to the workers.
        *args, **kwargs: for it.
        workers: how many.
        devices_per_worker: logical CPU devices in each; None leaves it to the function.

    Returns:
        What it returned, by rank.

    Raises:
        ImportError: if cloudpickle is not installed.
        ValueError: for less than one worker.
        RuntimeError: if a worker failed; its traceback has been printed.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1. Received: {workers}.")
    try:
        cloudpickle: Any = importlib.import_module("cloudpickle")
    except ImportError as error:
        raise ImportError(
            "tfparallel.launch.notebook needs cloudpickle: pip install cloudpickle."
        ) from error
    with (
        tempfile.TemporaryDirectory(prefix="tfparallel-") as folder,
        reserved_addresses(workers) as addresses,
    ):
        call = Path(folder) / "call.pickle"
        call.write_bytes(cloudpickle.dumps((function, args, kwargs)))
        results = [Path(folder) / f"result-{rank}.pickle" for rank in range(workers)]
        plan = plan_processes(
            {WORKER: addresses},
            {**os.environ, **REUSE_PORT_ENV},
            num_cores=len(os.sched_getaffinity(0)),
            devices_per_worker=devices_per_worker,
        )
        commands = [
            WorkerCommand(each.label, (sys.executable, _WORKER, str(call), str(path)), each.env)
            for each, path in zip(plan, results, strict=True)
        ]
        ending = run_job(commands, stdout=_Cell(sys.stdout), stderr=_Cell(sys.stderr))
        if ending.failed_rank is not None:
            raise RuntimeError(
                f"Expected all {workers} workers to return. Received: worker {ending.failed_rank} "
                f"failed (exit status {ending.status}); its traceback is printed above."
            )
        if ending.status != 0:
            raise KeyboardInterrupt
        return [pickle.loads(path.read_bytes()) for path in results]
