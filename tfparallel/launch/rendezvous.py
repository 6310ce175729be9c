"""Launchers of one job, one a host, tell one another the addresses of their processes.

Node 0 listens; each of the others connects, says what it has, and is told what all have:

    node 1   {"round": 0, "rank": 1, "addresses": {"worker": ["10.0.0.2:4711"]}}
    node 0   [{"worker": [...]}, {"worker": [...]}]        once all have come

Both prove that they start the same job, by a key made of its command and, where it is set, of the
job's secret (`proof.py`). A job that is started again meets again, in the next round. Imports no
TensorFlow.
"""

import contextlib
import hashlib
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Mapping

from tfparallel.coordination.listening import Door, Guest, listen
from tfparallel.coordination.patience import Wait
from tfparallel.coordination.proof import SECRET_VARIABLE, NotKnownError, introduce, key_of
from tfparallel.launch.nodes import Place

Offer = Mapping[str, list[str]]  # the addresses of a node's processes, by role

_POLL_S = 0.2
_CONNECT_S = 5.0  # at a time
_BACKLOG = 1024
_LARGEST_OFFER_BYTES = 1 << 16
_LARGEST_ANSWER_BYTES = 1 << 24


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
        self._key = key_of(hashlib.sha256(f"{place.num_nodes} {what}".encode()).hexdigest())
        self._opened = contextlib.ExitStack()
        self._door: Door | None = None

    def __enter__(self) -> "Rendezvous":
        if self.place.rank == 0:
            listener = self._opened.enter_context(
                listen(self.place.host, self.place.port, _BACKLOG)
            )
            self._door = self._opened.enter_context(Door(listener, self._key, _LARGEST_OFFER_BYTES))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

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
        request = {"round": number, "rank": self.place.rank, "addresses": offer}
        wait = self._wait("answer, when all nodes have come")
        node_0 = f"node 0 ({self.place.host}:{self.place.port})"
        with self._connected() as connection:
            try:
                answer = introduce(
                    connection,
                    self._key,
                    json.dumps(request).encode(),
                    lambda: self._look(wait, node_0),
                    _LARGEST_ANSWER_BYTES,
                )
            except NotKnownError as error:
                raise ValueError(
                    f"Expected {node_0} to be of this job, started with the same command, --nnodes "
                    f"{self.place.num_nodes} and {SECRET_VARIABLE}. Received: a refusal: {error}. "
                    f"(Node {self.place.rank} is speaking.)"
                ) from error
        return json.loads(answer)

    def _gather(self, number: int, offer: Offer) -> list[Offer]:
        """Waits for all others, then tells each what all have."""
        assert self._door is not None
        offers: dict[int, Offer] = {0: offer}
        wait = self._wait("come to the rendezvous")
        with contextlib.ExitStack() as stack:
            guests = []
            while len(offers) < self.place.num_nodes:
                missing = [r for r in range(self.place.num_nodes) if r not in offers]
                self._look(wait, f"nodes {missing}")
                if (guest := self._door.next(_POLL_S)) is None:
                    continue
                rank, addresses = self._offer_of(guest, number)
                if rank not in missing:
                    guest.close()
                    continue
                offers[rank] = addresses
                stack.callback(guest.close)
                guests.append(guest)
            everything = [offers[rank] for rank in range(self.place.num_nodes)]
            for guest in guests:
                with contextlib.suppress(OSError):  # it has gone; its workers will be missed
                    guest.answer(json.dumps(everything).encode())
        return everything

    def _offer_of(self, guest: Guest, number: int) -> tuple[int, Offer]:
        """Which node has come, and what it has; node -1, which nobody waits for, of another round.

        It knows the job, so that it is a launcher, of this version or another.
        """
        try:
            request = json.loads(guest.message)
            if request["round"] == number:
                return int(request["rank"]), dict(request["addresses"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._note(f"A launcher of this job is of another version: {error!r}.")
        return -1, {}

    def _connected(self) -> socket.socket:
        wait = self._wait("listen")
        address = self.place.host, self.place.port
        while True:
            try:
                return socket.create_connection(address, timeout=_CONNECT_S)
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
