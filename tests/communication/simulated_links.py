"""Ranks by the hundred in one process: the ring's own code, on links and clocks that are played.

A message of n bytes leaves a rank's link n * byte_s after those before it, and is there latency_s
later (the alpha-beta model). Adding takes no time. Ranks of one host share its link to the other
hosts; within a host each has a link of its own to each other. One rank's thread runs at a time, the
one with the earliest clock, so that links are taken in the order of time.
"""

import collections
import contextlib
import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from tfparallel.communication.alpha_beta import SMALL_BYTES, LinkCosts, most_halved_bytes
from tfparallel.communication.neighbours import GREETING_BYTES
from tfparallel.communication.ring import Ring
from tfparallel.communication.ring_of_hosts import RingOfHosts, equal_groups
from tfparallel.communication.ring_opening import NOTHING

_STACK_BYTES = 1 << 18


@dataclass(frozen=True)
class Links:
    """What they cost.

    Attributes:
        across: a message to another host.
        within: one to a rank of the same host.
        ranks_of_host: how many share a link.
    """

    across: LinkCosts
    within: LinkCosts
    ranks_of_host: int = 1

    def host(self, rank: int) -> int:
        """The number of the host where `rank` is."""
        return rank // self.ranks_of_host


class World:
    """Runs a function on each of some ranks, with a clock for each.

    Attributes:
        num_messages: sent so far, by all of them.
    """

    def __init__(self, num_ranks: int, links: Links):
        self.num_ranks, self.links = num_ranks, links
        self.num_messages = 0
        self._now_s = [0.0] * num_ranks
        self._free_s: dict[tuple, float] = collections.defaultdict(float)  # when links are
        self._channels: dict[tuple, collections.deque] = collections.defaultdict(collections.deque)
        self._waiting: dict[tuple, int] = {}
        self._ready: list[tuple[float, int]] = []
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._over = threading.Semaphore(0)
        self._error: BaseException | None = None

    def run(self, function: Callable[[int], object]) -> tuple[list, float]:
        """What `function` gives of each rank, and the seconds until the last one has it."""
        results: list = [None] * self.num_ranks

        def of_rank(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = function(rank)
            except BaseException as error:
                self._error = error
                self._over.release()
            else:
                self._next()

        before = threading.stack_size(_STACK_BYTES)
        for rank in range(self.num_ranks):
            threading.Thread(target=of_rank, args=(rank,), daemon=True).start()
        threading.stack_size(before)
        self._ready = [(0.0, rank) for rank in range(self.num_ranks)]
        self._next()
        self._over.acquire()
        if self._error is not None:
            raise self._error
        return results, max(self._now_s)

    def now_s(self, rank: int) -> float:
        """The clock of a rank."""
        return self._now_s[rank]

    def send(self, source: int, target: int, what: str, array: np.ndarray) -> None:
        """Gives bytes to a rank's link; they are sent while it goes on."""
        links, data = self.links, array.reshape(-1).view(np.uint8)
        is_across = links.host(source) != links.host(target)
        costs = links.across if is_across else links.within
        if is_across and links.ranks_of_host > 1:
            self._give_way(source)
        link = (links.host(source),) if is_across else (source, target)
        self._free_s[link] = max(self._free_s[link], self._now_s[source]) + data.size * costs.byte_s
        channel = source, target, what
        self._channels[channel].append((self._free_s[link] + costs.latency_s, data))
        self.num_messages += 1
        if channel in self._waiting:
            receiver = self._waiting.pop(channel)
            heapq.heappush(self._ready, (self._now_s[receiver], receiver))

    def receive(self, source: int, target: int, what: str, array: np.ndarray) -> None:
        """Fills `array` with what a rank sends; its clock is then at least when that is there."""
        channel, missing = (source, target, what), array.reshape(-1).view(np.uint8)
        while missing.size:
            waiting = self._channels[channel]
            if not waiting:
                self._waiting[channel] = target
                self._next()
                self._turns[target].acquire()
                continue
            there_s, data = waiting.popleft()
            count = min(data.size, missing.size)
            missing[:count] = data[:count]
            missing = missing[count:]
            if count < data.size:
                waiting.appendleft((there_s, data[count:]))
            self._now_s[target] = max(self._now_s[target], there_s)

    def _give_way(self, rank: int) -> None:
        """To those whose clocks are behind."""
        if self._ready and self._ready[0][0] < self._now_s[rank]:
            heapq.heappush(self._ready, (self._now_s[rank], rank))
            self._next()
            self._turns[rank].acquire()

    def _next(self) -> None:
        if self._ready:
            self._turns[heapq.heappop(self._ready)[1]].release()
        elif self._waiting:
            self._error = RuntimeError(f"All wait for one another: {sorted(self._waiting)[:4]}")
            self._over.release()
        else:
            self._over.release()


class PlayedNeighbours:
    """As `Neighbours`, of one rank of a world.

    Args:
        ranks: of the world, those of this ring in order.
        rank: this one's place among them.
        name: of the ring.
    """

    def __init__(self, world: World, ranks: Sequence[int], rank: int, name: str):
        self.rank, self.num_workers, self.names = rank, len(ranks), tuple(ranks)
        self._world, self._ranks, self._name = world, ranks, name
        self._own = ranks[rank]
        self._next, self._previous = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
        self.machine = SimpleNamespace(now_s=lambda: world.now_s(self._own))

    def put(self, array: np.ndarray) -> None:
        """As of `Neighbours`."""
        self._world.send(self._own, self._next, self._name, array)

    send_at_once = put

    def receive(self, array: np.ndarray) -> None:
        """As of `Neighbours`."""
        self._world.receive(self._previous, self._own, self._name, array)

    def flush(self) -> None:
        """What is played is never overwritten before it is sent."""

    def greet(self, kind: str, size_bytes: int, dtype: np.dtype) -> None:
        """As of `Neighbours`; all are in one collective."""
        del kind, size_bytes, dtype
        self.put(np.zeros(GREETING_BYTES, np.uint8))
        self.receive(np.empty(GREETING_BYTES, np.uint8))

    def greet_partners(self, kind: str, size_bytes: int, dtype: np.dtype) -> np.ndarray:
        """As of `Neighbours`."""
        del kind, size_bytes, dtype
        return np.zeros(GREETING_BYTES, np.uint8)

    def exchange(
        self, partner: int, outgoing: np.ndarray | None, incoming: np.ndarray | None, is_first: bool
    ) -> None:
        """As of `Neighbours`."""
        del is_first
        other, what = self._ranks[partner], f"{self._name}, partners"
        if outgoing is not None:  # it is added to before it is received
            self._world.send(self._own, other, what, outgoing.copy())
        if incoming is not None:
            self._world.receive(other, self._own, what, incoming)

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Nothing is open."""
        yield

    def close(self) -> None:
        """Nothing is open."""


def ring_of(world: World, rank: int, around: bool = False) -> Ring:
    """A rank's ring as `connect_ring` makes it, hosts first.

    Args:
        around: whether all sums go around it, whatever their sizes.
    """
    links, everyone = world.links, range(world.num_ranks)
    small_bytes = NOTHING if around else SMALL_BYTES
    groups = equal_groups([str(links.host(each)) for each in everyone])
    neighbours = PlayedNeighbours(world, everyone, rank, "all")
    if not groups:
        is_apart = links.ranks_of_host in (1, world.num_ranks)
        halved_bytes = most_halved_bytes(world.num_ranks) if is_apart and not around else NOTHING
        return Ring(neighbours, small_bytes, halved_bytes)
    own = groups[links.host(rank)]
    place = own.index(rank)
    of_place = [group[place] for group in groups]
    within = Ring(PlayedNeighbours(world, own, place, "within"))
    halved_bytes = NOTHING if around else most_halved_bytes(len(groups))
    across = PlayedNeighbours(world, of_place, of_place.index(rank), "across")
    across_ring = Ring(across, small_bytes, halved_bytes)
    return RingOfHosts(neighbours, small_bytes, within, across_ring, groups)


def ring_of_one_kind(world: World, rank: int, small_bytes: int, halved_bytes: int) -> Ring:
    """A ring of all ranks, with the limits of `Ring`."""
    neighbours = PlayedNeighbours(world, range(world.num_ranks), rank, "all")
    return Ring(neighbours, small_bytes, halved_bytes)
