import random

from tfparallel.parameter_server.least_loaded import BalancedBytes


def test_kernels_and_biases_are_spread_by_size():
    """Round robin by count would put every kernel on the first server."""
    placement = BalancedBytes(2)
    servers = [placement.place(size) for size in (4000, 40, 4000, 40, 4000, 40, 4000, 40)]
    assert servers[::2] == [0, 1, 1, 0] or sum(servers[::2]) == 2
    assert max(placement.loads) < 1.02 * sum(placement.loads) / 2


def test_largest_load_stays_below_mean_plus_largest_variable():
    rng = random.Random(0)
    for num_servers in (1, 2, 3, 7):
        sizes = [rng.choice((4, 256, 10_000, 1_000_000)) for _ in range(200)]
        placement = BalancedBytes(num_servers)
        for size in sizes:
            placement.place(size)
        assert sum(placement.loads) == sum(sizes)
        assert max(placement.loads) <= sum(sizes) / num_servers + max(sizes)


def test_slots_count_where_their_weight_is():
    placement = BalancedBytes(2)
    weight = placement.place(100)
    placement.add(weight, 200)
    assert placement.place(10) == 1 - weight
