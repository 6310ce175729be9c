"""A task's own address: taken by someone else, it is said who is there."""

import contextlib
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from tfparallel.coordination.probe import what_answers

T = TypeVar("T")


class PortTakenError(OSError):
    """Something else listens at this task's own address."""


def start_at_own_port(start: Callable[[], T], address: str, speaker: str) -> T:
    """What `start` gives, which starts TensorFlow's server at `address`.

    Args:
        start: called once.
        address: "host:port" of this task.
        speaker: which task it is.

    Raises:
        PortTakenError: naming the address and what answers there.
    """
    require_free(address, speaker)
    try:
        return start()
    except tf.errors.UnknownError as error:
        if "Could not start gRPC server" not in error.message:
            raise
        raise port_taken(address, speaker) from error


def require_free(address: str, speaker: str) -> None:
    """Raises PortTakenError where something listens at the port of this task's `address`."""
    port = int(address.rpartition(":")[2])
    try:
        with contextlib.closing(listener_at(port)):
            pass
    except OSError as error:
        raise port_taken(address, speaker) from error


def listener_at(port: int) -> socket.socket:
    """Listens where TensorFlow's server of this task will, or raises OSError.

    That is at all interfaces, whatever address it is given. Under `tfparallel launch` the launcher
    holds the port, which TensorFlow then shares.
    """
    is_shared = os.environ.get("TF_GRPC_REUSE_PORT") == "1"
    return socket.create_server(("", port), reuse_port=is_shared)


def port_taken(address: str, speaker: str) -> PortTakenError:
    """The error that says so."""
    answer = what_answers(address, timeout_s=1.0) or "a gRPC server answers, of another job perhaps"
    return PortTakenError(
        f"Expected port {address.rpartition(':')[2]} to be free for {speaker} ({address}). "
        f"Received: a port in use, where {answer}. `ss -ltnp` shows whose it is: end that process, "
        f"or give the task another port. ({speaker} is speaking.)"
    )
