"""Processes that stay up for many requests, so that TensorFlow starts once and not per test."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.multi_process.forking import forked
from tests.parameter_server.spawner import Child

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
GRACE_S = 15.0  # how long the others may go on once one worker has failed
LOG_TAIL_LINES = 60


class WorkerFailure(AssertionError):
    """A worker raised, died or fell silent; the text holds every worker's side of it."""


def cluster_environments(num_workers: int) -> list[dict[str, str]]:
    """One `TF_CONFIG` for each worker, on free loopback ports; nothing for a single worker."""
    if num_workers == 1:
        return [{}]
    sockets = [socket.socket() for _ in range(num_workers)]
    for each in sockets:  # all bound at once, so that no port is drawn twice
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            )
        }
        for rank in range(num_workers)
    ]


def horovod_environments(num_ranks: int) -> list[dict[str, str]]:
    """What `horovodrun` sets for each rank of this host, with a rendezvous server of our own.

    `horovodrun` itself does not pass on the standard input, which is how a pool is asked.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(0)
    port = server.start()
    slots = get_host_assignments(parse_hosts(f"localhost:{num_ranks}"), num_ranks)
    server.init(slots)
    return [
        {
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_RANK": str(slot.rank),
            "HOROVOD_SIZE": str(slot.size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        for slot in slots
    ]


class WorkerPool:
    """Workers that all get each request and answer it with one JSON line.

    Started by the first request, a `python -m` as a fork of a process that has imported TensorFlow,
    which takes no time. After a hang or a death every worker is killed; the next request
    starts fresh ones.

    Args:
        arguments: what follows `python` on the command line. The program reads requests from
            stdin and writes `{"ready": true}` once, then one reply per request, to stdout; a reply
            with a key `error` (a traceback) is a failure.
        environments: called at each start; gives one dictionary of variables per worker.
    """

    def __init__(
        self,
        arguments: list[str],
        environments: Callable[[], list[dict[str, str]]] = lambda: [{}],
    ):
        self._arguments = arguments
        self._environments = environments
        self._workers: list[_Worker] = []

    def ask(self, request: dict, timeout_s: float = 90.0) -> list[dict]:
        """Send `request` to every worker and return their replies in the order of their ranks."""
        self.send(request)
        return self.replies(timeout_s)

    def send(self, request: dict) -> None:
        """Send `request` to every worker; `replies` must come next."""
        if not self._workers:
            self._start()
        for worker in self._workers:
            worker.send(request)

    def replies(self, timeout_s: float = 90.0) -> list[dict]:
        """Wait for one reply of each worker.

        Raises:
            WorkerFailure: with every failed worker's traceback or the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        replies: dict[int, dict] = {}
        while len(replies) < len(self._workers) and time.monotonic() < deadline:
            for worker in self._workers:
                if worker.rank not in replies and (reply := worker.reply()) is not None:
                    replies[worker.rank] = reply
                    if "error" in reply:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        silent = [worker for worker in self._workers if worker.rank not in replies]
        reports = [f"worker {r}:\n{replies[r]['error']}" for r in replies if "error" in replies[r]]
        reports += [f"worker {w.rank}: no reply. Its log ends:\n{w.log_tail()}" for w in silent]
        if not reports:
            return [replies[rank] for rank in sorted(replies)]
        # A failed peer leaves half a collective behind: do not reuse the others.
        if len(self._workers) > 1 or silent or any(r.get("died") for r in replies.values()):
            self.close()
        raise WorkerFailure("\n".join(reports))

    def close(self) -> None:
        """Kill every worker of this pool."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _start(self) -> None:
        self._workers = [
            _Worker(rank, self._arguments, environment)
            for rank, environment in enumerate(self._environments())
        ]
        self.replies(START_TIMEOUT_S)


class _Worker:
    """One process: its pipes, its log file and a thread that reads its replies."""

    def __init__(self, rank: int, arguments: list[str], environment: dict[str, str]):
        self.rank = rank
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        (stdin, requests), (replies, stdout) = os.pipe(), os.pipe()
        self._process = self._started(arguments, environment, stdin, stdout)
        os.close(stdin)
        os.close(stdout)
        self._requests, self._replies_pipe = os.fdopen(requests, "w"), os.fdopen(replies)
        self._replies: queue.Queue = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _started(
        self, arguments: list[str], environment: dict[str, str], stdin: int, stdout: int
    ) -> Child | subprocess.Popen:
        option, module, *rest = arguments
        if option == "-m":
            return forked(module, rest, environment, Path(self._log.name), (stdin, stdout))
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=stdin,
            stdout=stdout,
            stderr=self._log,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        )

    def send(self, request: dict) -> None:
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            pass  # the reading thread reports the death

    def reply(self) -> dict | None:
        try:
            return self._replies.get(timeout=0.05)
        except queue.Empty:
            return None

    def log_tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        lines = os.pread(self._log.fileno(), size, 0).decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._log.close()
        with contextlib.suppress(BrokenPipeError):  # of a request that it has not read
            self._requests.close()

    def _read(self) -> None:
        with self._replies_pipe as replies:
            for line in replies:
                self._replies.put(json.loads(line))
        status = self._process.wait()
        error = f"died with exit status {status}. Its log ends:\n{self.log_tail()}"
        self._replies.put({"error": error, "died": True})
