"""Processes of jobs that ask another, which has imported TensorFlow, for a fork to do their work.

A job's launcher starts them as ever, with their environment, cores and output. To import TensorFlow
in each is most of what a short job takes on few cores.

    launcher -> process -- asks --> server
                   |                   | forks
               waits for its end <-- keeper -> fork, which does the work

Who asked ends as its fork does, also by a signal; and a fork ends when who asked has.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait

_NAME = "forks"  # of the socket, in a folder
_STANDARD = (1, 2)  # output, errors
_MOST_DIGITS = 16


def listen_for_forks(folder: str) -> socket.socket:
    """Where processes ask; they wait until somebody serves."""
    listener = socket.socket(socket.AF_UNIX)
    with _address(folder) as address:
        listener.bind(address)
    listener.listen()
    return listener


def serve_forks(listener: socket.socket, work: Callable[..., int]) -> None:
    """Forks this process for each that asks, until the one that started it has ended.

    It becomes a session, which all forks are in.

    Args:
        listener: of `listen_for_forks`.
        work: given the arguments of who asked, makes an exit status.
    """
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    starter = multiprocessing.parent_process()
    assert starter is not None
    while starter.sentinel not in wait([listener, starter.sentinel]):
        asking, _ = listener.accept()
        with asking:
            if not os.fork():
                listener.close()
                _keep(asking, work)
                return


def ask_for_fork(folder: str, arguments: Sequence[str]) -> int | None:
    """The exit status of a fork that did the work; None where nobody listens."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            with _address(folder) as address:
                asking.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        place = [dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0))]
        socket.send_fds(asking, [b"\0"], _STANDARD)
        asking.sendall(json.dumps([*place, *arguments]).encode() + b"\n")
        status = int(asking.recv(_MOST_DIGITS) or b"1")
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def _keep(asking: socket.socket, work: Callable[..., int]) -> None:
    """Has a fork do the work, and tells how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, standard, _, _ = socket.recv_fds(asking, 1, len(_STANDARD))
    with asking.makefile("r") as text:
        environment, folder, cores, *arguments = json.loads(text.readline())
    if not (pid := os.fork()):
        asking.close()
        for number, file in zip(_STANDARD, standard, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        os.sched_setaffinity(0, cores)
        tempfile.tempdir = None  # as the environment says
        try:
            sys.exit(work(*arguments))
        finally:
            atexit._run_exitfuncs()  # as any process does that is no fork
    for file in standard:
        os.close(file)  # readers of a pipe wait for all that can write
    ended = os.pidfd_open(pid)
    if ended not in wait([ended, asking]):
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        asking.sendall(str(status).encode())


@contextlib.contextmanager
def _address(folder: str) -> Iterator[str]:
    """Of the socket, short whatever the folder is called: addresses have 108 bytes."""
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}/{_NAME}"
    finally:
        os.close(number)
