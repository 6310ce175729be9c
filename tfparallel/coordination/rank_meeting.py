"""Ranks meet at the rendezvous of `horovodrun` before Horovod starts.

Horovod itself waits for the others in C++ for 30 s, says nothing meanwhile, and then ends the
process (SIGABRT). So each rank first writes there that it has come, and waits until all have.
"""

import http.client
import os
import socket
from collections.abc import Mapping

from tfparallel.coordination.waiting import REAL, Clock, wait_until_nobody_is_missing

_SCOPE = "tfparallel_start"
_ANSWERS_S = 5.0


def meet_ranks(variables: Mapping[str, str], limit_s: float | None, clock: Clock = REAL) -> None:
    """Waits until all ranks of the job have come; nothing where there is no such rendezvous.

    MPI starts its ranks together. An elastic job's driver waits for them itself
    (`horovodrun --elastic-timeout`), and counts anew each time.

    Args:
        variables: those that `horovodrun` sets.
        limit_s: how long to wait; None waits for ever.
        clock: to wait on.

    Raises:
        WaitedTooLong: naming the ranks that have not come, or the rendezvous that does not answer.
    """
    host = variables.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if not host or variables.get("HOROVOD_ELASTIC") == "1":
        return
    port, rank = variables["HOROVOD_GLOO_RENDEZVOUS_PORT"], variables["HOROVOD_RANK"]
    address = f"{host}:{port}"
    waits_for = set(range(int(variables["HOROVOD_SIZE"])))
    has_told = False

    def missing() -> str:
        nonlocal has_told
        try:
            if not has_told:
                _request(address, "PUT", rank, f"{socket.gethostname()} {os.getpid()}".encode())
                has_told = True
            waits_for.difference_update({r for r in waits_for if _has_come(address, r)})
        except (OSError, http.client.HTTPException) as error:
            what = f"{type(error).__name__}: {error}"
            return f"horovodrun's rendezvous ({address}, which does not answer as one: {what})"
        return ", ".join(f"rank {each}" for each in sorted(waits_for))

    speaker = f"rank {rank} (on host {socket.gethostname()})"
    wait_until_nobody_is_missing(missing, speaker, "start", limit_s, "start_timeout_s", clock)


def _has_come(address: str, rank: int) -> bool:
    return _request(address, "GET", str(rank)) == 200


def _request(address: str, method: str, key: str, value: bytes | None = None) -> int:
    """The status of the answer.

    Raises:
        HTTPException: for another one than the rendezvous gives.
    """
    connection = http.client.HTTPConnection(address, timeout=_ANSWERS_S)
    try:
        connection.request(method, f"/{_SCOPE}/{key}", value)
        status = connection.getresponse().status
    finally:
        connection.close()
    if status not in (200, 404):
        raise http.client.HTTPException(f"status {status}")
    return status
