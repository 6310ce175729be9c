"""A ring of hosts with several workers each: these meet among themselves before hosts meet.

In a plain ring of N workers each connection carries `2 (N - 1) / N` times an array, those between
hosts too, which are the slow ones. Here only what a host has summed leaves it:

    host A: workers 0, 1     within hosts    0 has half of A's sum, 1 the other half
    host B: workers 2, 3     across hosts    0 and 2 sum their halves of it all, 1 and 3 theirs
                             within hosts    both halves are handed out

A worker sends as many bytes as in a plain ring, in `2 (k - 1) + 2 (H - 1)` steps instead of
`2 (N - 1)`, for H hosts of k workers; a host sends `2 (H - 1) / H` times the array instead of
`2 (N - 1) / N`: of two hosts of eight, 1 instead of 1.875.

Source: Jia et al., "Highly scalable deep learning training system with mixed-precision",
arXiv 1807.11205, section 3.3; Horovod's HOROVOD_HIERARCHICAL_ALLREDUCE and NCCL do likewise.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.communication.neighbours import Neighbours
from tfparallel.communication.ring import Ring, aligned_empty


class RingOfHosts(Ring):
    """As `Ring`; small arrays, and gathers of unequal rows, go around all workers.

    Args:
        neighbours, small_bytes: as of `Ring`, of all workers.
        within: of the workers of this host.
        across: of one worker of each host, this one among them.
        groups: the ranks of each host, in the order of `across`.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        small_bytes: int,
        within: Ring,
        across: Ring,
        groups: Sequence[Sequence[int]],
    ):
        super().__init__(neighbours, small_bytes)
        within.across = across
        self._within, self._across = within, across
        self._ranks = np.array(groups).T.reshape(-1)  # those of equal place in a host together
        self._in_parts_s = 0.0

    def close(self) -> None:
        """As of `Ring`."""
        for close in (super().close, self._within.close, self._across.close):
            close()

    @contextlib.contextmanager
    def journal(self, journal: LinkJournal | None = None) -> Iterator[LinkJournal]:
        """As of `Ring`."""
        with (
            super().journal(journal) as journal,
            self._within.journal(journal),
            self._across.journal(journal),
        ):
            yield journal

    @property
    def bytes_sent(self) -> int:
        """As of `Ring`."""
        return self.times.bytes_sent

    @property
    def times(self) -> LinkTimes:
        """As of `Ring`."""
        whole, within, across = super().times, self._within.times, self._across.times
        return LinkTimes(
            whole.spent_s + self._in_parts_s,
            whole.waited_s + within.waited_s + across.waited_s,
            whole.bytes_sent + within.bytes_sent + across.bytes_sent,
        )

    def all_reduce(self, array: np.ndarray) -> np.ndarray:
        """As of `Ring`; the order of addition is another."""
        if array.nbytes <= self.small_bytes:
            with self._closed_on_error():
                return super().all_reduce(array)
        with self._in_parts():
            return self._within.all_reduce(array)

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        """As of `Ring`; the order of addition is another."""
        self._check_rows(array)
        rows = array[self._ranks].reshape(self._within.num_workers, -1)
        with self._in_parts():
            of_hosts = self._within.reduce_scatter(rows).reshape(self._across.num_workers, -1)
            return self._across.reduce_scatter(of_hosts).reshape(array.shape[1:])

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """As of `Ring`."""
        with self._closed_on_error():
            return super().all_gather(array)

    def all_gather_each(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As of `Ring`."""
        if self._is_gathered_among_partners(arrays):
            with self._closed_on_error():
                return super().all_gather_each(arrays)
        with self._in_parts():
            wholes = self._within.all_gather_each(self._across.all_gather_each(arrays))
        results = []
        for whole in wholes:
            result = aligned_empty(
                (self._num_workers, whole.size // self._num_workers), whole.dtype
            )
            result[self._ranks] = whole.reshape(result.shape)
            results.append(result.reshape(-1))
        return results

    @contextlib.contextmanager
    def _in_parts(self) -> Iterator[None]:
        began_s = self._neighbours.machine.now_s()
        with self._lock, self._closed_on_error():
            yield
        self._in_parts_s += self._neighbours.machine.now_s() - began_s

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Closes all connections when anything fails, so that nobody waits for this worker."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def equal_groups(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, where these have equally many, more than one; else nothing.

    Args:
        hosts: of each rank.
    """
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    sizes = {len(ranks) for ranks in groups.values()}
    is_even = len(groups) > 1 and len(sizes) == 1 and min(sizes) > 1
    return list(groups.values()) if is_even else []
