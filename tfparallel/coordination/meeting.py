"""Workers meet at their addresses before TensorFlow starts its servers there.

TensorFlow waits for the others in C++, with Python's lock: nothing can be said meanwhile, and a
stranger behind a port is waited for as if it were a worker. So each worker first listens at its own
port itself, says there who it is, and asks at all other addresses, until it has seen everybody.

    rank 0   listens, asks ...................... has seen 1 --> TensorFlow's server
    rank 1                  listens, asks, has seen 0 --> TensorFlow's server

Who has seen all goes on; those who have not seen it yet find TensorFlow's server in its place,
which counts as well.
"""

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator, Sequence

from tfparallel.coordination.port import listener_at, port_taken
from tfparallel.coordination.probe import answering, ask, describe_answer
from tfparallel.coordination.waited import waiting_for_others
from tfparallel.coordination.waiting import wait_until_nobody_is_missing

_SIGN = b"tfparallel "
_LISTENS_S = 0.5  # to a guest, after it has been told


def meet(addresses: Sequence[str], rank: int, limit_s: float | None) -> None:
    """Waits until all workers of this job have started.

    Args:
        addresses: "host:port" of every worker by rank.
        rank: of this one.
        limit_s: how long to wait; None waits for ever.

    Raises:
        PortTakenError: if something else listens at this worker's own address.
        WaitedTooLong: naming the workers that have not come, their addresses and what answers.
    """
    job = hashlib.sha256(" ".join(addresses).encode()).hexdigest()[:16].encode()
    others = {f"rank {r}": each for r, each in enumerate(addresses) if r != rank}
    answers: dict[str, str] = {}  # what was there instead, in words

    def has_come(name: str) -> bool:
        answers[name] = _what_is_there(others[name], job)
        return not answers[name]

    def missing() -> str:
        for name in answering({name: name for name in others}, has_come):
            del others[name]
        return ", ".join(f"{name} ({others[name]}, where {answers[name]})" for name in others)

    with _listening(addresses[rank], f"rank {rank}", _SIGN + job), waiting_for_others():
        wait_until_nobody_is_missing(missing, f"rank {rank}", "start", limit_s, "start_s")


def _what_is_there(address: str, job: bytes) -> str:
    """What is there instead of a worker of this job, in words; "" if one is there."""
    answer = ask(address)
    if isinstance(answer, str):
        return answer
    if answer is None or not answer.startswith(_SIGN):
        return describe_answer(answer)
    is_ours = answer == _SIGN + job
    return "" if is_ours else "a worker answers whose TF_CONFIG has other addresses"


@contextlib.contextmanager
def _listening(address: str, speaker: str, sign: bytes) -> Iterator[None]:
    """Tells who connects who this is, until the context ends."""
    try:
        listener = listener_at(int(address.rpartition(":")[2]))
    except OSError as error:
        raise port_taken(address, speaker) from error
    thread = threading.Thread(target=_tell_guests, args=(listener, sign), daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # `accept` raises
        listener.close()


def _tell_guests(listener: socket.socket, sign: bytes) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            guest, _ = listener.accept()
            with guest, contextlib.suppress(OSError):  # gone
                guest.settimeout(_LISTENS_S)
                guest.sendall(sign)
                guest.recv(64)  # closed with something unread, it would take back what was sent
