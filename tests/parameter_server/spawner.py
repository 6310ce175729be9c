"""A process that has imported TensorFlow and forks a fresh one for every task: 0 s, not 4 s.

It must never start TensorFlow itself, so that a fork finds it as after an import.
"""

import atexit
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).parents[2]


class Child:
    """A process that a spawner started; the part of `subprocess.Popen` that tests need."""

    def __init__(self, spawner: "Spawner", pid: int):
        self._spawner, self.pid = spawner, pid
        self._status: int | None = None
        self._lock = threading.Lock()  # the status is told once

    def poll(self) -> int | None:
        """The exit status, -9 if it was killed, None while it runs."""
        with self._lock:
            if self._status is None:
                self._status = self._spawner.ask({"poll": self.pid})
            return self._status

    def wait(self, timeout_s: float = 30.0) -> int | None:
        """Waits for the end; None if it still runs after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return self.poll()

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """`kill -9`."""
        self.send_signal(signal.SIGKILL)


class Spawner:
    """Starts processes that call a function of a module; they die with it.

    Args:
        preload: the module to import before the first request.
        by_fork: fork it from this process, which has imported everything and not started
            TensorFlow yet.
    """

    def __init__(self, preload: str, by_fork: bool = False):
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair()
        if by_fork:
            if os.fork() == 0:
                self._socket.close()
                die_with_parent()
                _serve_requests(other)
        else:
            subprocess.Popen(
                [sys.executable, "-m", "tests.parameter_server.spawner", str(other.fileno())]
                + [preload],
                cwd=REPOSITORY,
                env=process_environment({}),
                pass_fds=[other.fileno()],
                preexec_fn=die_with_parent,
            )
        other.close()
        self._answers = self._socket.makefile()

    def spawn(self, function: str, environment: Mapping[str, str], log: Path) -> Child:
        """Calls "module:function" in a new process, with variables added to its environment."""
        request = {"spawn": function, "environment": dict(environment), "log": str(log)}
        return Child(self, self.ask(request))

    def spawn_module(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        pipes: Sequence[int] = (),
    ) -> Child:
        """What `python -m module *arguments` is, from beginning to end, in a new process.

        Args:
            module, arguments: it runs as `__main__`, with these in `sys.argv`.
            environment: all of its variables.
            log: where what it prints goes.
            pipes: ends of pipes of this process, to be its input and output instead; they can be
                closed here then.
        """
        ends = [f"/proc/{os.getpid()}/fd/{number}" for number in pipes]
        request = {"spawn": module, "arguments": list(arguments), "pipes": ends}
        return Child(self, self.ask({**request, "environment": dict(environment), "log": str(log)}))

    def ask(self, request: dict) -> int | None:
        """One request, one answer."""
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            return json.loads(self._answers.readline())

    def close(self) -> None:
        """Ends it, and all that it started."""
        self._answers.close()
        self._socket.close()


def _serve_requests(connection: socket.socket) -> str:
    """Serves until its parent ends; returns in a fork that is to run a module, with its name."""
    for line in connection.makefile():
        request = json.loads(line)
        if "poll" in request:
            done, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        else:
            flags = (os.O_RDONLY, os.O_WRONLY)
            pipes = [os.open(*of) for of in zip(request.get("pipes", ()), flags)]
            answer = os.fork()
            if answer == 0:
                connection.close()
                if "arguments" in request:
                    return _become(request, pipes)
                _call(request)
            for end in pipes:
                os.close(end)
        connection.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _become(request: dict, pipes: list[int]) -> str:
    """What tells a process from its parent, for `python -m`; returns the module."""
    die_with_parent()
    _print_to(request["log"])
    for standard, end in enumerate(pipes):  # input and output
        os.dup2(end, standard)
        os.close(end)
    for name in set(os.environ) - set(request["environment"]):
        del os.environ[name]
    os.environ.update(request["environment"])
    np.random.seed()  # no two draw alike, which Python's own generator sees to by itself
    sys.argv = [request["spawn"], *request["arguments"]]
    return request["spawn"]


def _print_to(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _call(request: dict) -> None:
    die_with_parent()
    status = 1
    try:
        _print_to(request["log"])
        os.environ.update(request["environment"])
        module, _, function = request["spawn"].partition(":")
        getattr(importlib.import_module(module), function)()
        atexit._run_exitfuncs()  # a chief tells its servers that it is done
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


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


def die_with_parent() -> None:
    """Called in a child: it is killed when its parent ends, however that ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    importlib.import_module(sys.argv[2])
    module = _serve_requests(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
