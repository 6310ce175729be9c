"""More ranks than a machine runs: the ring's code on links that are played."""

import numpy as np
import pytest

from tests.communication.simulated_links import Links, World, ring_of, ring_of_one_kind
from tfparallel.communication.alpha_beta import LinkCosts
from tfparallel.communication.ring_opening import NOTHING

ACROSS, WITHIN = LinkCosts(50e-6, 8e-10), LinkCosts(10e-6, 2.5e-10)


def summed(num_ranks, ranks_of_host, size, make=ring_of):
    world = World(num_ranks, Links(ACROSS, WITHIN, ranks_of_host))
    rng = np.random.default_rng(size)
    arrays = rng.integers(-99, 99, (num_ranks, size)).astype("float32")
    totals, seconds = world.run(lambda rank: make(world, rank).all_reduce(arrays[rank]))
    np.testing.assert_array_equal(totals, np.broadcast_to(np.sum(arrays, axis=0), arrays.shape))
    return seconds


def around(world, rank):
    return ring_of_one_kind(world, rank, NOTHING, NOTHING)


@pytest.mark.parametrize("ranks_of_host", [1, 3, 8])
@pytest.mark.parametrize("num_ranks", [16, 24, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize("size", [5, 20_000, 300_001])
def test_sums_of_many_ranks_are_right(num_ranks, ranks_of_host, size):
    summed(num_ranks, ranks_of_host, size)


def test_a_ring_takes_as_long_as_it_is_known_to():
    """Four ranks, and chunks of one segment: 2 (N - 1) messages and a greeting."""
    size = 40_000
    expected = ACROSS.ring_s(4 * size, 4)
    assert summed(4, 1, size, around) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("num_ranks", "ranks_of_host"), [(16, 1), (32, 1), (64, 8)])
def test_sixty_four_kilobytes_take_no_more_than_twice_the_bound(num_ranks, ranks_of_host):
    num_hosts = num_ranks // ranks_of_host
    least_s = np.log2(num_hosts) * ACROSS.latency_s + np.log2(ranks_of_host) * WITHIN.latency_s
    least_s += 2 * (num_hosts - 1) / num_hosts * (1 << 16) * ACROSS.byte_s
    assert least_s < summed(num_ranks, ranks_of_host, 1 << 14) < 2 * least_s
    if ranks_of_host == 1:
        assert summed(num_ranks, 1, 1 << 14, around) > 4 * least_s


def test_a_deadlock_is_said():
    world = World(2, Links(ACROSS, WITHIN))
    with pytest.raises(RuntimeError, match="All wait for one another"):
        world.run(lambda rank: world.receive(1 - rank, rank, "nothing", np.empty(1)))
