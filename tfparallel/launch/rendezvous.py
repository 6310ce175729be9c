"""Launchers of one job, one a host, tell one another the addresses of their processes.

Node 0 listens; each of the others connects, says what it has, and is told what all have:

    node 1   {"round": 0, "rank": 1, "job": ..., "addresses": {"worker": ["10.0.0.2:4711"]}}
    node 0   [{"worker": [...]}, {"worker": [...]}]        once all have come

A job that is started again meets again, in the next round. Imports no TensorFlow.
"""

import contextlib
import hashlib
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from io import BufferedRWPair

from tfparallel.coordination.patience import Wait
from tfparallel.launch.nodes import Place

Offer = Mapping[str, list[str]]  # the addresses of a node's processes, by role

_POLL_S = 0.2
_MESSAGE_S = 5.0  # for a guest to say what it wants
_LARGEST_MESSAGE_BYTES = 1 << 20


class Rendezvous:
    """Where the launchers of one job meet; used as a context, open as long as the job may restart.

    Args:
        place: of this launcher.
        what: is the same on all of them, or they are not of one job: the command, say.
        limit_s: how long to wait for the others.
        note: tells a person something.

    Raises:
        OSError: on node 0, if its port is taken.
    """

    def __init__(self, place: Place, what: str, limit_s: float, note: Callable[[str], None]):
        self.place, self._limit_s, self._note = place, limit_s, note
        self._job = hashlib.sha256(f"{place.num_nodes} {what}".encode()).hexdigest()
        self._listener: socket.socket | None = None

    def __enter__(self) -> "Rendezvous":
        if self.place.rank == 0:
            self._listener = socket.create_server(("", self.place.port), backlog=1024)
            self._listener.settimeout(_POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()

    def own_host(self) -> str:
        """The address by which the other hosts reach this one."""
        if self.place.rank == 0:
            return self.place.host
        with self._connected() as connection:
            own = str(connection.getsockname()[0])
        # Over loopback only this machine reaches node 0, so it is node 0's.
        return self.place.host if ipaddress.ip_address(own).is_loopback else own

    def exchange(self, number: int, offer: Offer) -> list[Offer]:
        """What all nodes offer in this round, by rank.

        Raises:
            WaitedTooLong: naming who has not come.
            ValueError: if the launcher at the rendezvous starts another job.
        """
        if self.place.rank == 0:
            return self._gather(number, offer)
        request = {"round": number, "rank": self.place.rank, "job": self._job, "addresses": offer}
        with self._connected() as connection, connection.makefile("rwb") as stream:
            connection.settimeout(self._limit_s)
            stream.write(json.dumps(request).encode() + b"\n")
            stream.flush()
            answer = stream.readline(_LARGEST_MESSAGE_BYTES)
        if not answer:
            raise ValueError(
                f"Expected node 0 of this job at {self.place.host}:{self.place.port}, started "
                f"with the same command and --nnodes {self.place.num_nodes}. Received: a refusal. "
                f"(Node {self.place.rank} is speaking.)"
            )
        return json.loads(answer)

    def _gather(self, number: int, offer: Offer) -> list[Offer]:
        """Waits for all others, then tells each what all have."""
        offers: dict[int, Offer] = {0: offer}
        wait = self._wait("come to the rendezvous")
        with contextlib.ExitStack() as guests:
            streams = []
            while len(offers) < self.place.num_nodes:
                missing = [r for r in range(self.place.num_nodes) if r not in offers]
                self._look(wait, f"nodes {missing}")
                for connection in self._next_guest():
                    request, stream = self._heard(connection, number)
                    if request is None or request["rank"] in offers:
                        stream.close()  # it would keep the connection open
                        connection.close()
                        continue
                    guests.callback(connection.close)
                    streams.append(stream)
                    offers[request["rank"]] = request["addresses"]
            everything = [offers[rank] for rank in range(self.place.num_nodes)]
            for stream in streams:
                with contextlib.suppress(OSError):  # it has gone; its workers will be missed
                    stream.write(json.dumps(everything).encode() + b"\n")
                    stream.flush()
        return everything

    def _next_guest(self) -> Iterator[socket.socket]:
        assert self._listener is not None
        with contextlib.suppress(TimeoutError):
            yield self._listener.accept()[0]

    def _heard(self, connection: socket.socket, number: int) -> tuple[dict | None, BufferedRWPair]:
        """The request of a launcher of this job, or None of anybody else."""
        connection.settimeout(_MESSAGE_S)
        stream = connection.makefile("rwb")
        try:
            request = json.loads(stream.readline(_LARGEST_MESSAGE_BYTES))
            is_ours = (request["job"], request["round"]) == (self._job, number)
            is_known = 0 < int(request["rank"]) < self.place.num_nodes
            return (request if is_ours and is_known else None), stream
        except (OSError, ValueError, KeyError, TypeError):
            return None, stream

    def _connected(self) -> socket.socket:
        wait = self._wait("listen")
        address = self.place.host, self.place.port
        while True:
            try:
                return socket.create_connection(address, timeout=_MESSAGE_S)
            except OSError as error:
                self._look(wait, f"node 0 ({address[0]}:{address[1]}: {error.strerror or error})")
                time.sleep(_POLL_S)

    def _wait(self, what: str) -> Wait:
        speaker = f"node {self.place.rank}"
        return Wait(speaker, what, self._limit_s, time.monotonic(), "--rendezvous-timeout")

    def _look(self, wait: Wait, whom: str) -> None:
        if (said := wait.look(time.monotonic(), whom)) is not None:
            self._note(said[1])


def cluster_of(offers: list[Offer]) -> dict[str, list[str]]:
    """The whole cluster: the addresses of each role, node by node."""
    roles = dict.fromkeys(role for offer in offers for role in offer)
    return {role: [a for offer in offers for a in offer.get(role, ())] for role in roles}


def first_indices(offers: list[Offer], rank: int) -> dict[str, int]:
    """The index of the first process of node `rank`, by role."""
    return {role: sum(len(offer.get(role, ())) for offer in offers[:rank]) for role in offers[rank]}
