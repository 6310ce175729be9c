"""Checks of trainings that lose a process: they go on, on the devices that they had."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tfparallel.selftest.job_checks import command_of_horovod, launcher, outcomes_in, outcomes_of
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.verdicts import MOST_DIFFERENCE, CheckFailedError, Passed

_KILLED_AT = "5"  # with a backup at each second
NUM_BATCHES = 12  # of a training that is left alone
WORKERS, ELASTIC = "workers", "elastic"  # jobs, by name
# Hosts by name: where one fails, Horovod leaves out its host.
HOSTS = ("localhost", "127.0.0.1")
# What ranks of an elastic job need of the launcher's environment, and do not get.
_PASSED_ON = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR"),
    *("KERAS_BACKEND", "TF_NUM_INTEROP_THREADS", "TF_CPP_MIN_LOG_LEVEL"),
)


class ProcessPlace(NamedTuple):
    """Where a process was when it began to train.

    Attributes:
        attempt: how often its job, or its training, had begun before.
        processes: how many there were in its job.
        rank: its number in its job, when it first began.
        device: of the weights, by kind and number, and what the driver calls it if it is a GPU.
    """

    attempt: int
    processes: int
    rank: int
    device: str


def restart(bench: Bench) -> Passed:
    """A training that is killed and started again ends with the bits of one that was left alone."""
    alone = _resumed(bench, "alone", kill_at="0")
    killed = _resumed(bench, "killed", kill_at=_KILLED_AT)
    if killed is not None:
        raise CheckFailedError("expected SIGKILL to end the first process; it ended by itself")
    again = _resumed(bench, "killed", kill_at="0")
    if alone is None or again is None or alone["found"] != again["found"]:
        raise CheckFailedError("the weights differ from those of a training that was left alone")
    check_goes_on([again])
    return Passed(f"killed after {_KILLED_AT} batches, resumed to the same bits")


def check_goes_on(found: Sequence[dict]) -> None:
    """Holds how many batches processes have trained after a kill against those of all.

    Raises:
        CheckFailedError: if they began from the start, which ends with the same weights.
    """
    most = max(each["figures"]["batches"] for each in found)
    if most >= NUM_BATCHES:
        raise CheckFailedError(f"trained all {most} batches again, instead of those that were left")


def _resumed(bench: Bench, name: str, kill_at: str) -> dict | None:
    """What a process said that has ended; None of one that was killed."""
    check = [sys.executable, "-m", "tfparallel.selftest.one_check", bench.to_json()]
    command = [*check, "recovery_tasks:train_with_backups", name, kill_at]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == -signal.SIGKILL:
        return None
    (outcome,) = outcomes_in(done.stdout)
    return outcome


def restart_job(bench: Bench) -> Passed:
    """A job of workers, of which one is killed: the launcher starts it again, and it goes on."""
    start = launcher(bench, "--max-restarts", "1")
    found = outcomes_of(start, bench, "recovery_tasks:train_as_worker", _KILLED_AT)
    places = read_places(bench, WORKERS)
    text = judge_places(places, processes_after=len(found), gpus=bench.gpus)
    check_goes_on(found)
    return judge_weights([each["figures"]["difference"] for each in found], text)


def shrink(bench: Bench) -> Passed:
    """An elastic job of two ranks, of which one is killed: the other goes on alone."""
    hosts = bench.path / "hosts.sh"
    hosts.write_text("#!/bin/sh\n" + "".join(f"echo {name}:1\n" for name in HOSTS))
    hosts.chmod(0o700)
    found = outcomes_of(
        elastic_horovodrun(bench, hosts), bench, "recovery_tasks:train_elastic", _KILLED_AT
    )
    text = judge_places(read_places(bench, ELASTIC), processes_after=1, gpus=bench.gpus)
    check_goes_on(found)
    return judge_weights([each["figures"]["difference"] for each in found], text)


def elastic_horovodrun(bench: Bench, hosts: Path) -> list[str]:
    """What starts a module in two elastic ranks of this machine.

    Args:
        bench: where they run.
        hosts: an executable that names them.

    Raises:
        CheckSkippedError: without Horovod.
    """
    environment = bench.environment()
    passed = [f"{key}={environment[key]}" for key in _PASSED_ON if key in environment]
    numbers = ["--gloo", "-np", "2", "--min-np", "1", "--max-np", "2"]
    where = ["--host-discovery-script", str(hosts), "--network-interface", "lo"]
    return [command_of_horovod(), *numbers, *where, "env", *passed, sys.executable, "-m"]


def judge_places(places: Sequence[ProcessPlace], processes_after: int, gpus: Sequence[str]) -> str:
    """Holds where processes were at their end against where they began; says it in words.

    Raises:
        CheckFailedError: if nobody began anew, or somebody did elsewhere, on the host in place of
            a GPU, or on another's GPU.
    """
    text = "; ".join(f"attempt {x.attempt}: rank {x.rank} on {x.device}" for x in sorted(places))
    again = [x for x in places if x.attempt == max(x.attempt for x in places)]
    if any(x.attempt == 0 or x.processes != processes_after for x in again):
        raise CheckFailedError(f"expected a start again with {processes_after} processes; {text}")
    had = {x.rank: x.device for x in places if x.attempt == 0}
    if any(x.device != had[x.rank] for x in again):
        raise CheckFailedError(f"began on one device and went on on another: {text}")
    if gpus and (len({*had.values()}) < len(had) or not all("GPU" in x for x in had.values())):
        raise CheckFailedError(f"expected a GPU for each: {text}")
    return f"went on where they were: {', '.join(f'{x.rank} on {x.device}' for x in sorted(again))}"


def judge_weights(differences: Sequence[float], text: str) -> Passed:
    """Holds the weights of those that went on against one device's.

    Raises:
        CheckFailedError: if they are others.
    """
    most = max(differences, default=float("nan"))
    if not most <= MOST_DIFFERENCE:
        raise CheckFailedError(f"weights differ by {most:.1e} from one device's; {text}")
    return Passed(f"{text}; {most:.1e} from one device", {"difference": most})


def write_place(bench: Bench, job: str, place: ProcessPlace) -> None:
    """Leaves it for `read_places`, whatever becomes of this process."""
    path = bench.path / f"place_{job}_{place.rank}_{place.attempt}.json"
    path.write_text(json.dumps(place))


def read_places(bench: Bench, job: str) -> list[ProcessPlace]:
    """Where processes of a job have begun."""
    paths = bench.path.glob(f"place_{job}_*.json")
    return [ProcessPlace(*json.loads(path.read_text())) for path in paths]
