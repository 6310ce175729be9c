"""What a worker or a parameter server does all its life: serve operations until the chief is done.

How a server learns that the chief is done
------------------------------------------
The chief can run operations on a server, and nothing else: no Python, no port of our own. So a
server keeps a pipe at a file descriptor that both sides know, and the chief runs `WriteFile` there:

    chief                                       worker 1
    WriteFile("/proc/self/fd/200", "here") -->  a pipe --> os.read: the chief has come
    WriteFile("/proc/self/fd/200", "done") -->  a pipe --> os.read --> exit with status 0

A chief that died says nothing. Its server's port then refuses connections, which a server notices
by itself; for `chief_s` it serves on, in case the chief is started again. A chief that never was
there, or was done before this server started, is waited for `start_s`.
"""

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterable
from typing import NoReturn

import tensorflow as tf

from tfparallel.coordination.patience import Silence, Wait
from tfparallel.coordination.port import start_at_own_port
from tfparallel.coordination.probe import is_listening, what_answers
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.coordination.waiting import look

_MAILBOX_FD = 200
_MAILBOX = f"/proc/self/fd/{_MAILBOX_FD}"
_HAS_COME, _DONE = b"here", b"done"
_HERE = "/device:CPU:0"
_POLL_S = 1.0


def serve(
    cluster: tf.train.ClusterSpec,
    task_type: str,
    task_index: int,
    chief_address: str,
    timeouts: Timeouts,
    protocol: str = "grpc",
) -> NoReturn:
    """Serves until the chief is done, then ends this process.

    Args:
        cluster: all tasks.
        task_type, task_index: this one.
        chief_address: "host:port".
        timeouts: `start_s` for a chief that has not been there; `chief_s` for one that is gone to
            come back; `end_s` for the last calls of one that is done.
        protocol: of the servers.

    Raises:
        SystemExit: with status 0 when the chief is done; with a message (status 1) when it is gone
            or never comes.
        PortTakenError: if something listens at this task's own address.
    """
    speaker = f"{task_type} {task_index}"
    reading_end = _open_mailbox()
    cpu = tf.config.list_physical_devices("CPU")[0]
    cpus = tf.config.get_logical_device_configuration(cpu) or [None]  # a server asks for itself
    config = tf.compat.v1.ConfigProto(device_count={"CPU": len(cpus)})
    # `join` would never return; the server lives as long as this process.
    server = start_at_own_port(
        lambda: tf.distribute.Server(
            cluster, task_type, task_index, protocol=protocol, config=config
        ),
        cluster.task_address(task_type, task_index),
        speaker,
    )
    try:
        _wait_for_end(reading_end, speaker, chief_address, timeouts)
    except TimeoutError as error:
        sys.stderr.write(f"{error}\n")
        _exit_without_destructors(1)
    finally:
        sys.stdout.flush()
    del server
    _exit_without_destructors(0)


def _wait_for_end(reading_end: int, speaker: str, chief: str, timeouts: Timeouts) -> None:
    """Until the chief says that it is done; TimeoutError where it never comes, or has died."""
    silence = Silence([chief], time.monotonic())
    start: Wait | None = Wait(
        speaker, "start", timeouts.start_s, time.monotonic(), "Timeouts.start_s"
    )
    while True:
        readable, _, _ = select.select([reading_end], [], [], _POLL_S)
        said = os.read(reading_end, 4096) if readable else b""
        if _DONE in said:
            _serve_to_the_end_of(chief, timeouts.end_s)
            return
        is_there = is_listening(chief)
        silence.heard(time.monotonic(), [chief] if is_there else [])
        if _HAS_COME in said or (start is not None and is_there and not what_answers(chief)):
            start = None
        if start is not None:
            look(start, f"the chief ({chief}, where {what_answers(chief) or 'it is'})")
        elif silence.longer_than(timeouts.chief_s):
            raise TimeoutError(
                f"Expected the chief ({chief}) to say that it is done. Received: nothing, and its "
                f"port has been closed for {timeouts.chief_s:g} s: it died. ({speaker} is "
                "speaking.)"
            )


def _serve_to_the_end_of(chief_address: str, limit_s: float) -> None:
    """Serves the chief's last calls: it still deletes what it keeps here, and would complain."""
    deadline_s = time.monotonic() + limit_s
    while is_listening(chief_address) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S / 5)


def _open_mailbox() -> int:
    """The end to read from of the pipe that the chief writes to."""
    reading_end, writing_end = os.pipe()
    os.dup2(writing_end, _MAILBOX_FD)
    os.close(writing_end)
    return reading_end


def _exit_without_destructors(status: int) -> NoReturn:
    """Ends the process: a server's destructor waits for clients that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def say_here(devices: Iterable[str]) -> None:
    """Tells the servers at `devices` that the chief has come; called on the chief, as it connects.

    So a chief that dies within a second is known to have been there.
    """
    _tell(devices, _HAS_COME)


def say_done(devices: Iterable[str], timeout_s: float) -> None:
    """Tells the servers at `devices` that the chief is done; called on the chief, at its end.

    A server that is stopped or dead cannot be told: no more than `timeout_s` is spent on all.
    """
    deadline_s = time.monotonic() + timeout_s
    for thread in _tell(devices, _DONE):
        thread.join(max(0.0, deadline_s - time.monotonic()))


def _tell(devices: Iterable[str], word: bytes) -> list[threading.Thread]:
    """Writes into the pipes of the servers at `devices`; the threads that do it."""
    with tf.device(_HERE):  # Python's lock is held while a value becomes a tensor elsewhere
        mailbox, contents = tf.constant(_MAILBOX), tf.constant(word)

    def tell(device: str) -> None:
        # A server that is gone needs no telling.
        with contextlib.suppress(tf.errors.OpError), tf.device(device):
            tf.io.write_file(mailbox, contents)

    threads = [threading.Thread(target=tell, args=(device,), daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    return threads
