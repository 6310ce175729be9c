"""Jobs of `horovodrun` on this machine."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.multi_process.forking import forked
from tests.multi_process.pool import REPOSITORY, horovod_environments
from tests.parameter_server.spawner import Child


def horovodrun(
    module: str,
    *arguments: object,
    num_ranks: int = 2,
    options: Sequence[str] = (),
    within: Sequence[str] = (),
) -> tuple[int, str]:
    """Exit status and output of `tests/horovod/MODULE.py ARGUMENTS` on ranks of this host.

    Args:
        within: a command that runs the launcher, given as its last arguments.
    """
    program = ["-m", f"tests.horovod.{module}", *map(str, arguments)]
    return run_program(program, num_ranks, options, within)


@contextlib.contextmanager
def forked_ranks(
    folder: Path, num_ranks: int, module: str, *arguments: object
) -> Iterator[list[Child]]:
    """Ranks of `tests/MODULE.py`, each writing to `folder/<rank>.log`, without a launcher."""
    texts = [str(argument) for argument in arguments]
    ranks = [
        forked(f"tests.{module}", texts, environment, folder / f"{rank}.log")
        for rank, environment in enumerate(horovod_environments(num_ranks))
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run_program(
    arguments: Sequence[str],
    num_ranks: int,
    options: Sequence[str] = (),
    within: Sequence[str] = (),
) -> tuple[int, str]:
    """The same of Python with `arguments`."""
    launcher = Path(sys.executable).with_name("horovodrun")
    # An elastic job's ranks get only a few of the launcher's variables.
    program = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable]
    transport = [] if "--mpi" in options else ["--gloo"]  # one built with both would take MPI
    # Where a test of this process has started Horovod, its size of buckets is in the environment.
    variables = {k: v for k, v in os.environ.items() if k != "HOROVOD_FUSION_THRESHOLD"}
    finished = subprocess.run(
        [*within, launcher, *transport, "-np", str(num_ranks), *options, *program, *arguments],
        env=variables,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return finished.returncode, finished.stdout
