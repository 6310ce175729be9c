"""Which arrays are small: what a message costs at all, against what its bytes cost.

A message of n bytes takes `latency + n * byte_s` (the alpha-beta model). N ranks sum n bytes in

    ring        2 (N - 1) + 1 messages, one after another, which carry 2 (N - 1) / N * n bytes
    halving     about 2 log2 N messages, which carry as many; where N is no power of two, 2 n more
    doubling    num_steps(N) messages of n bytes

so that doubling is faster up to the size at which both are equal, and halving between the two. NCCL
compares its algorithms in this way, with tables of latencies and bandwidths (src/graph/tuning.cc);
MPICH and Open MPI have fixed sizes (2,048 and 10,000 bytes); Gloo sums everything around a ring.
Two ranks measure both costs when they start; they have the same bits either way. With more of them
the order of addition is another, and has to be the same in each start of a job: their sizes are
fixed.

Source: Hockney, "The communication challenge for MPP", Parallel Computing 1994; Thakur,
Rabenseifner and Gropp, IJHPCA 2005.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tfparallel.communication.doubling import num_steps

# Equal at 4 ranks for 100 Mbit/s and 0.1 ms a message; on faster links more would be faster still.
SMALL_BYTES = 1 << 14
# Beyond it the ring is faster where messages take no long time: it adds a part while the next one
# is on its way. A partner adds all when it is there, at 2 GB a second.
MOST_SMALL_BYTES = 1 << 18
_ADDED_BYTE_S = 5e-10
MOST_FAR_BYTES = 1 << 23  # which take so long that a message more hardly counts
_BYTES_OF_A_MESSAGE = 1250  # 0.1 ms at 100 Mbit/s; on faster links it is more
# Halves are copied and added when they are there, segments of a ring while the next one comes: 30
# us, about as long as a message.
_ADDED_BYTES = 1 << 16
_SIZES_BYTES = 1 << 10, 1 << 16  # that are timed
_MOST_TIMES, _BUDGET_S = 8, 0.1  # for each of them: one more than what begins within the budget


class LinkCosts(NamedTuple):
    """Of one message between two ranks while all others exchange messages, too.

    Attributes:
        latency_s: of an empty one.
        byte_s: of each byte.
    """

    latency_s: float
    byte_s: float

    def ring_s(self, size_bytes: float, num_workers: int) -> float:
        """How long an all-reduce around the ring takes."""
        share = 2 * (num_workers - 1) / num_workers
        return (2 * num_workers - 1) * self.latency_s + share * size_bytes * self.byte_s

    def doubling_s(self, size_bytes: float, num_workers: int) -> float:
        """How long one by recursive doubling takes."""
        return num_steps(num_workers) * (self.latency_s + size_bytes * self.byte_s)


def most_small_bytes(costs: LinkCosts, num_workers: int) -> int:
    """Up to how many bytes doubling is not slower than the ring."""
    spared_s = (2 * num_workers - 1 - num_steps(num_workers)) * costs.latency_s
    bytes_more = num_steps(num_workers) - 2 * (num_workers - 1) / num_workers
    most = min(MOST_FAR_BYTES, max(MOST_SMALL_BYTES, int(spared_s / _ADDED_BYTE_S)))
    if bytes_more * costs.byte_s * most <= spared_s:
        return most
    return int(spared_s / (bytes_more * costs.byte_s))


def most_halved_bytes(num_workers: int) -> int:
    """Up to how many bytes halving is not slower than the ring, on links of ranks of their own."""
    power = 1 << (num_workers.bit_length() - 1)
    spared = 2 * num_workers - 1 - 2 * (power.bit_length() - 1)
    if num_workers == power:
        return spared * _ADDED_BYTES
    return (spared - 2) * _BYTES_OF_A_MESSAGE // 2


def measured_costs(
    add: Callable[[np.ndarray], np.ndarray], num_workers: int, now_s: Callable[[], float]
) -> LinkCosts:
    """Measures by all-reduces of recursive doubling, which all ranks call together.

    All return the same bits: what one has spent travels in the arrays that are summed, so that all
    stop after the same one.

    Args:
        add: the all-reduce.
        num_workers: how many ranks there are.
        now_s: this rank's clock.
    """
    add(np.zeros(1))  # all are there
    own = [_fastest_s(add, size, num_workers, now_s) for size in _SIZES_BYTES]
    small_s, large_s = (each / num_steps(num_workers) for each in own)
    small, large = _SIZES_BYTES
    byte_s = max(0.0, large_s - small_s) / (large - small)
    return LinkCosts(max(0.0, small_s - small * byte_s), byte_s)


def _fastest_s(
    add: Callable[[np.ndarray], np.ndarray],
    size_bytes: int,
    num_workers: int,
    now_s: Callable[[], float],
) -> float:
    """The mean over ranks of the fastest but the last: who comes later, waits for so much less."""
    array, fastest_s = np.zeros(size_bytes // 8), math.inf
    for _ in range(_MOST_TIMES):
        began_s = now_s()
        spent_s, last_s = add(array)[:2]
        if last_s:
            fastest_s = min(fastest_s, last_s / num_workers)
        array[1] = now_s() - began_s
        array[0] += array[1]
        if spent_s > _BUDGET_S * num_workers:
            break
    return fastest_s
