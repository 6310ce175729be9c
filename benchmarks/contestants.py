"""The contestants: which program with which arguments, and the processes that run it."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfparallel.launch.ports import REUSE_PORT_ENV, reserved_addresses

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parent
TIMEOUT_S = 300.0
# Serves Horovod's ranks until its input ends; prints its port and the place of every rank.
RENDEZVOUS = """
import json, sys
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
server = RendezvousServer(0)
port = server.start()
slots = get_host_assignments(parse_hosts(sys.argv[1]), 2)
server.init(slots)
print(json.dumps([port, [vars(slot) for slot in slots]]), flush=True)
sys.stdin.read()
server.stop()
"""
RANK_NAMES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
TENSORFLOW, TORCH = "tensorflow_contestant.py", "torch_contestant.py"


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        name: as printed.
        group: contestants of one group share the work in the same way; ratios are within it.
        num_processes: processes on this machine, one replica each; 1 may hold two replicas.
        python: interpreter that runs `program`.
        package: folder that holds the `tfparallel` to import.
    """

    name: str
    group: str
    num_processes: int
    program: str = TENSORFLOW
    arguments: dict = field(default_factory=dict)
    python: str = sys.executable
    package: Path = REPOSITORY

    @property
    def threads(self) -> int:
        """Intra-op threads of each process: two in all, for every contestant."""
        return 2 // self.num_processes


ONE_PROCESS, TWO_PROCESSES = "1 process, 2 CPU devices", "2 processes"
ONE_DEVICE = Contestant(
    "one device, fit", ONE_PROCESS, 1, arguments={"strategy": "none", "loop": "fit"}
)


def ours(package: Path = REPOSITORY, suffix: str = "") -> list[Contestant]:
    """tfparallel's contestants, of the checkout at `package`."""
    rows = [
        ("tfparallel Mirrored, fit", ONE_PROCESS, 1, "mirrored", "fit"),
        ("tfparallel MultiWorker, fit", TWO_PROCESSES, 2, "multi_worker", "fit"),
        ("tfparallel MultiWorker, loop", TWO_PROCESSES, 2, "multi_worker", "loop"),
    ]
    return [
        Contestant(
            name + suffix,
            group,
            num_processes,
            arguments={"strategy": strategy, "loop": loop, "stock": False},
            package=package,
        )
        for name, group, num_processes, strategy, loop in rows
    ]


def stock() -> list[Contestant]:
    """TensorFlow's own; `fit` under its multi-worker strategy crashes on Keras 3."""
    return [
        Contestant(
            "tf.distribute Mirrored, fit",
            ONE_PROCESS,
            1,
            arguments={"strategy": "mirrored", "loop": "fit", "stock": True},
        ),
        Contestant(
            "tf.distribute MultiWorker, loop",
            TWO_PROCESSES,
            2,
            arguments={"strategy": "multi_worker", "loop": "loop", "stock": True},
        ),
    ]


def torch_ddp(python: str) -> Contestant:
    """torch's DistributedDataParallel over Gloo."""
    return Contestant("torch DDP Gloo, loop", TWO_PROCESSES, 2, program=TORCH, python=python)


class ContestantFailure(RuntimeError):
    """A process of a contestant raised, died or fell silent."""


class Running:
    """The processes of one contestant, ready and waiting.

    Args:
        contestant: which one.
        problem: name of the problem.
        optimizer: "sgd" or "adam".
        environments: variables of each process, by rank.
        prefixes: what comes before each process's command, by rank.
    """

    def __init__(
        self, contestant: Contestant, problem: str, optimizer: str, environments, prefixes=None
    ):
        self.contestant = contestant
        self._logs = [
            tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - they live as long as this
            for _ in environments
        ]
        self._processes = []
        for rank, environment in enumerate(environments):
            arguments = {
                **contestant.arguments,
                "problem": problem,
                "optimizer": optimizer,
                "threads": contestant.threads,
                "rank": rank,
                "num_workers": contestant.num_processes,
            }
            self._processes.append(
                subprocess.Popen(
                    [
                        *(prefixes[rank] if prefixes else []),
                        *(contestant.python, FOLDER / contestant.program, json.dumps(arguments)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._logs[rank],
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(contestant.package), **environment},
                )
            )
        self._answers()

    def ask(self, do: str, **arguments) -> list:
        """Sends a request to every process; returns their results by rank.

        Raises:
            ContestantFailure: with the traceback or the end of the log of every process.
        """
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # its silence is reported below
                process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
                process.stdin.flush()
        return self._answers()

    def _answers(self) -> list:
        # A process that hangs is killed, which ends the line that is waited for.
        watchdog = threading.Timer(TIMEOUT_S, self.kill)
        watchdog.start()
        try:
            lines = [process.stdout.readline() for process in self._processes]
        finally:
            watchdog.cancel()
        messages = [json.loads(line or '{"error": "died or fell silent"}') for line in lines]
        if any("error" in message for message in messages):
            raise ContestantFailure(
                "\n".join(
                    f"{self.contestant.name}, process {rank}: {message.get('error', 'went well')}\n"
                    f"its log ends:\n{Path(self._logs[rank].name).read_text()[-2000:]}"
                    for rank, message in enumerate(messages)
                )
            )
        return [message["result"] for message in messages]

    def kill(self) -> None:
        """Ends every process."""
        for process in self._processes:
            process.kill()


@contextlib.contextmanager
def running(contestant: Contestant, problem: str, optimizer: str) -> Iterator[Running]:
    """Starts a contestant's processes, and kills them on exit."""
    with contextlib.ExitStack() as stack:
        environments = [base_environment(contestant) for _ in range(contestant.num_processes)]
        if contestant.num_processes > 1:
            addresses = stack.enter_context(reserved_addresses(contestant.num_processes))
            store = stack.enter_context(tempfile.TemporaryDirectory())
            for rank, environment in enumerate(environments):
                task = {"type": "worker", "index": rank}
                cluster = {"cluster": {"worker": addresses}, "task": task}
                environment["TF_CONFIG"] = json.dumps(cluster)
                environment["TORCH_STORE"] = f"{store}/store"
        if contestant.arguments.get("strategy") == "horovod":
            of_ranks = stack.enter_context(rendezvous(f"127.0.0.1:{contestant.num_processes}"))
            environments = [{**a, **b} for a, b in zip(environments, of_ranks, strict=True)]
        processes = Running(contestant, problem, optimizer, environments)
        stack.callback(processes.kill)
        yield processes


@contextlib.contextmanager
def rendezvous(hosts: str, prefix: Sequence[str] = ()) -> Iterator[list[dict[str, str]]]:
    """Horovod's meeting point on the first of two ranks' hosts; yields each rank's variables.

    Args:
        hosts: as `horovodrun -H` takes them.
        prefix: what comes before the command.
    """
    server = subprocess.Popen(
        [*prefix, sys.executable, "-c", RENDEZVOUS, hosts],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port, slots = json.loads(server.stdout.readline())
        yield [
            {
                "HOROVOD_HOSTNAME": slot["hostname"],
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": slots[0]["hostname"],
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                "HOROVOD_GLOO_IFACE": "lo",
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                **{f"HOROVOD_{name.upper()}": str(slot[name]) for name in RANK_NAMES},
            }
            for slot in slots
        ]
    finally:
        server.kill()
        server.communicate()


def base_environment(contestant: Contestant) -> dict[str, str]:
    """The variables of every process of a contestant."""
    return {
        **REUSE_PORT_ENV,
        "TF_NUM_INTEROP_THREADS": "8",
        "TF_NUM_INTRAOP_THREADS": str(contestant.threads),
        "OMP_NUM_THREADS": str(contestant.threads),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": "tensorflow",
        "GLOO_SOCKET_IFNAME": "lo",  # as TensorFlow: both talk over loopback
    }
