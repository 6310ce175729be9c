"""A real cluster on loopback for tests: one process a task, ended with the test."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# What the strategy's constructor does on a server, without the seconds that importing Keras takes.
_SERVE = """
from tfparallel.cluster import read_tf_config
from tfparallel.parameter_server.cluster import ParameterServerCluster, Timeouts
ParameterServerCluster(read_tf_config().cluster_resolver()).serve(Timeouts())
"""


def free_addresses(count: int) -> list[str]:
    """Loopback addresses, bound at once so that no port is drawn twice."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


class ServerProcesses:
    """The workers and parameter servers of one cluster; the chief is someone else.

    Args:
        num_workers, num_ps: how many there are.
        serve: the Python code that each of them runs.
    """

    def __init__(self, num_workers: int = 2, num_ps: int = 2, serve: str = _SERVE):
        addresses = free_addresses(1 + num_workers + num_ps)
        self.cluster = {
            "chief": addresses[:1],
            "worker": addresses[1 : 1 + num_workers],
            "ps": addresses[1 + num_workers :],
        }
        self._serve = serve
        self._logs: dict[tuple[str, int], Path] = {}
        self.processes: dict[tuple[str, int], subprocess.Popen] = {}
        for task_type in ("ps", "worker"):
            for index in range(len(self.cluster[task_type])):
                self.start(task_type, index)

    def environment(self, task_type: str, index: int) -> dict[str, str]:
        """The variables that give a process its place."""
        config = {"cluster": self.cluster, "task": {"type": task_type, "index": index}}
        return {"TF_CONFIG": json.dumps(config)}

    def start(self, task_type: str, index: int) -> None:
        """Starts a task, or starts it again."""
        log = Path(tempfile.mkstemp(prefix=f"{task_type}{index}-")[1])
        self._logs[task_type, index] = log
        with log.open("wb") as output:
            self.processes[task_type, index] = subprocess.Popen(
                [sys.executable, "-c", self._serve],
                env=process_environment(self.environment(task_type, index)),
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                preexec_fn=die_with_parent,
            )

    def kill(self, task_type: str, index: int) -> None:
        """`kill -9`."""
        process = self.processes[task_type, index]
        process.kill()
        process.wait()

    def stop(self, task_type: str, index: int) -> None:
        """SIGSTOP: the process is there and does nothing."""
        self.processes[task_type, index].send_signal(signal.SIGSTOP)

    def go_on(self, task_type: str, index: int) -> None:
        """SIGCONT."""
        self.processes[task_type, index].send_signal(signal.SIGCONT)

    def log(self, task_type: str, index: int) -> str:
        """What a task has printed since it was started last."""
        return self._logs[task_type, index].read_text(errors="replace")

    def statuses(self, timeout_s: float = 30.0) -> dict[tuple[str, int], int | None]:
        """Exit statuses, waiting for those that still run; None for who runs on."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and any(
            process.poll() is None for process in self.processes.values()
        ):
            time.sleep(0.1)
        return {task: process.poll() for task, process in self.processes.items()}

    def close(self) -> None:
        """Ends everything that still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        for log in self._logs.values():
            log.unlink(missing_ok=True)


def process_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `variables`, and nothing of another cluster."""
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    return {
        **inherited,
        "PYTHONPATH": str(REPOSITORY),
        "KERAS_BACKEND": "tensorflow",
        "TF_NUM_INTEROP_THREADS": "8",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **variables,
    }


def run_chief(
    servers: ServerProcesses, arguments: Sequence[str], timeout_s: float = 120.0, **variables: str
) -> subprocess.CompletedProcess:
    """Runs a chief to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=process_environment({**servers.environment("chief", 0), **variables}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=REPOSITORY,
        preexec_fn=die_with_parent,
    )


def die_with_parent() -> None:
    """Called in a child: it is killed when its parent ends, however that ends."""
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
