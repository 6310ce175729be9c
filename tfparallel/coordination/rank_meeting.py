"""Ranks meet at the rendezvous of `horovodrun` before Horovod starts.

Horovod itself waits for the others in C++ for 30 s, says nothing meanwhile, and then ends the
process (SIGABRT). So each rank first writes there that it has come. Rank 0 looks for all of them,
and writes when they have; the others wait for that, and look for a few at a time, to name them.
"""

import http.client
import os
import socket
from collections.abc import Mapping

from tfparallel.coordination.waiting import REAL, Clock, wait_until_nobody_is_missing

_SCOPE = "tfparallel_start"
_ALL = "all"
_ANSWERS_S = 5.0
_LOOKS_FOR = 8  # ranks at a time: 256 that each look for all would ask 65,000 times


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
    waits_for = list(range(int(variables["HOROVOD_SIZE"])))
    has_told = False

    def missing() -> str:
        nonlocal has_told
        try:
            if not has_told:
                _request(address, "PUT", rank, f"{socket.gethostname()} {os.getpid()}".encode())
                has_told = True
            if rank == "0":
                _look_for(address, waits_for, len(waits_for))
                if not waits_for:
                    _request(address, "PUT", _ALL, b"")
            elif _has_come(address, _ALL):
                waits_for.clear()
            else:
                _look_for(address, waits_for, _LOOKS_FOR)
        except (OSError, http.client.HTTPException) as error:
            what = f"{type(error).__name__}: {error}"
            return f"horovodrun's rendezvous ({address}, which does not answer as one: {what})"
        return ", ".join(f"rank {each}" for each in sorted(waits_for))

    speaker = f"rank {rank} (on host {socket.gethostname()})"
    wait_until_nobody_is_missing(missing, speaker, "start", limit_s, "start_timeout_s", clock)


def _look_for(address: str, ranks: list[int], how_many: int) -> None:
    """Takes those of the first `ranks` out that have come; the others go behind the rest."""
    looked_for, ranks[:how_many] = ranks[:how_many], []
    ranks += [rank for rank in looked_for if not _has_come(address, str(rank))]


def _has_come(address: str, key: str) -> bool:
    return _request(address, "GET", key) == 200


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
