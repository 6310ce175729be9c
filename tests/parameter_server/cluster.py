"""A real cluster on loopback for tests: one process a task, ended with the test.

Without parameter servers it is that of a pipeline.
"""

import json
import signal
import socket
import tempfile
import time
from pathlib import Path

from tests.parameter_server.spawner import Child, Spawner

SERVERS = "tests.parameter_server.servers"


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
        spawner: who starts them; None makes one.
    """

    def __init__(
        self, num_workers: int = 2, num_ps: int = 2, spawner: Spawner | None = None, **variables
    ):
        addresses = free_addresses(1 + num_workers + num_ps)
        self.cluster = {
            "chief": addresses[:1],
            "worker": addresses[1 : 1 + num_workers],
        }
        if num_ps:
            self.cluster["ps"] = addresses[1 + num_workers :]
        self._spawner = spawner or Spawner(SERVERS)
        self._variables = variables
        self._logs: dict[tuple[str, int], Path] = {}
        self.processes: dict[tuple[str, int], Child] = {}
        for task_type in ("ps", "worker"):
            for index in range(len(self.cluster.get(task_type, ()))):
                self.start(task_type, index)

    def environment(self, task_type: str, index: int) -> dict[str, str]:
        """The variables that give a process its place."""
        config = {"cluster": self.cluster, "task": {"type": task_type, "index": index}}
        return {"TF_CONFIG": json.dumps(config)}

    def start(self, task_type: str, index: int) -> None:
        """Starts a task, or starts it again."""
        log = Path(tempfile.mkstemp(prefix=f"{task_type}{index}-")[1])
        self._logs[task_type, index] = log
        environment = {**self.environment(task_type, index), **self._variables}
        self.processes[task_type, index] = self._spawner.spawn(f"{SERVERS}:serve", environment, log)

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
        return {
            task: process.wait(max(0.0, deadline_s - time.monotonic()))
            for task, process in self.processes.items()
        }

    def close(self) -> None:
        """Ends everything that still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        for log in self._logs.values():
            log.unlink(missing_ok=True)
