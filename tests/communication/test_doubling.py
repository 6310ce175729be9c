"""Who exchanges with whom, and up to which size that is faster."""

import pytest

from tfparallel.communication.alpha_beta import (
    MOST_FAR_BYTES,
    MOST_SMALL_BYTES,
    LinkCosts,
    most_halved_bytes,
    most_small_bytes,
)
from tfparallel.communication.doubling import (
    Exchange,
    all_reduce_exchanges,
    halving_exchanges,
    num_steps,
)


@pytest.mark.parametrize("num_workers", [*range(1, 18), 1000])
def test_every_rank_ends_with_the_sum_of_all_in_the_same_order(num_workers):
    """Played in steps: what a rank has is a tuple of ranks, bracketed as it was added."""
    left = [all_reduce_exchanges(rank, num_workers) for rank in range(num_workers)]
    sums: list = list(range(num_workers))
    while any(left):
        ready = [rank for rank, each in enumerate(left) if each and is_matched(rank, left)]
        assert ready, "ranks wait for one another"
        sent = {rank: sums[rank] for rank in ready if left[rank][0].sends}
        for rank in ready:
            partner, _, receives, adds = left[rank].pop(0)
            if adds:
                sums[rank] = tuple([sums[rank], sent[partner]][:: -1 if partner < rank else 1])
            elif receives:
                sums[rank] = sent[partner]
    assert all(each == sums[0] for each in sums)
    assert flat(sums[0]) == list(range(num_workers))


def is_matched(rank: int, left: list[list[Exchange]]) -> bool:
    partner, sends, receives, _ = left[rank][0]
    theirs = left[partner][0] if left[partner] else None
    return theirs is not None and theirs[:3] == (rank, receives, sends)


@pytest.mark.parametrize("size", [0, 1, 5, 1000])
@pytest.mark.parametrize("num_workers", [*range(1, 18), 100])
def test_halves_of_every_rank_end_as_the_whole(num_workers, size):
    """Played in steps: of each number, in the order in which it was added up."""
    left = [halving_exchanges(rank, num_workers, size) for rank in range(num_workers)]
    sums = [[rank] * size for rank in range(num_workers)]
    num_sent = [0] * num_workers
    while any(left):
        ready = [rank for rank, each in enumerate(left) if each and are_matched(rank, left)]
        assert ready, "ranks wait for one another"
        sent = {rank: sums[rank][left[rank][0].sent or slice(0)] for rank in ready}
        for rank in ready:
            partner, given, received, adds = left[rank].pop(0)
            num_sent[rank] += len(sent[rank])
            theirs, own = sent[partner], sums[rank]
            if adds:
                pairs = zip(own[received], theirs, strict=True)
                theirs = [tuple([x, y][:: -1 if partner < rank else 1]) for x, y in pairs]
            if received is not None:
                own[received] = theirs
    assert all(each == sums[0] for each in sums)
    assert all(flat(number) == list(range(num_workers)) for number in sums[0])
    if num_workers in (2, 4, 8, 16) and size == 1000:
        around = 2 * (num_workers - 1) * size // num_workers
        assert num_sent == pytest.approx([around] * num_workers, abs=num_workers)


def are_matched(rank: int, left: list[list]) -> bool:
    partner, sent, received, _ = left[rank][0]
    theirs = left[partner][0] if left[partner] else None
    return theirs is not None and theirs[:3] == (rank, received, sent)


@pytest.mark.parametrize("num_workers", [3, 4, 5, 8, 12, 16, 100, 128, 1000])
@pytest.mark.parametrize("costs", [LinkCosts(1e-4, 8e-8), LinkCosts(5e-5, 8e-10)])
def test_halves_are_faster_where_they_are_taken(num_workers, costs):
    """On 100 Mbit/s, and on 10 Gbit/s, where what is added takes as long as a quarter of a byte."""
    size = most_halved_bytes(num_workers)
    power = 1 << (num_workers.bit_length() - 1)
    exchanges = [halving_exchanges(rank, num_workers, 1 << 20) for rank in range(num_workers)]
    messages = max(map(len, exchanges))
    share = 2 * (power - 1) / power + (2 if power < num_workers else 0)
    seconds = messages * costs.latency_s + share * size * costs.byte_s + size * 0.25 * 8e-10
    assert size < 1 << 14 or seconds <= 1.001 * costs.ring_s(size, num_workers)


def flat(tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [rank for part in tree for rank in flat(part)]


def test_five_ranks_fold_two_of_them():
    assert all_reduce_exchanges(0, 5) == [
        Exchange(1, True, False, False),
        Exchange(1, False, True, False),
    ]
    assert [each.partner for each in all_reduce_exchanges(1, 5)] == [0, 2, 3, 0]
    assert [each.partner for each in all_reduce_exchanges(4, 5)] == [3, 2]


@pytest.mark.parametrize(
    ("num_workers", "expected"), [(1, 0), (2, 1), (3, 3), (4, 2), (8, 3), (9, 5), (1000, 11)]
)
def test_messages_that_follow_one_another(num_workers, expected):
    assert num_steps(num_workers) == expected


def test_the_limit_is_where_both_take_as_long():
    """8 ranks, 20 us, 1 Gbit/s: 12 messages fewer, and 1.25 times the bytes more."""
    costs = LinkCosts(latency_s=20e-6, byte_s=8e-9)
    limit = most_small_bytes(costs, 8)
    assert limit == int(12 * 20e-6 / (1.25 * 8e-9))
    assert costs.ring_s(limit, 8) == pytest.approx(costs.doubling_s(limit, 8), rel=1e-3)
    assert costs.ring_s(2 * limit, 8) < costs.doubling_s(2 * limit, 8)


@pytest.mark.parametrize(
    ("costs", "num_workers"),
    [
        (LinkCosts(5e-6, 0.0), 8),  # bytes cost nothing
        (LinkCosts(20e-6, 8e-9), 2),  # two ranks send the same bytes in either way
        (LinkCosts(10e-6, 0.0), 2),
    ],
)
def test_large_arrays_are_never_small(costs, num_workers):
    assert most_small_bytes(costs, num_workers) == MOST_SMALL_BYTES


@pytest.mark.parametrize("latency_s", [1e-3, 25e-3, 1.0])
def test_over_a_long_way_two_exchange_what_adds_up_faster_than_messages_come(latency_s):
    """Two messages fewer, of the same bytes; at 2 GB a second all is added when it is there."""
    limit = most_small_bytes(LinkCosts(latency_s, 8e-8), 2)
    assert limit == min(MOST_FAR_BYTES, 2 * latency_s * 2e9)


def test_without_latency_nothing_is_small():
    assert most_small_bytes(LinkCosts(0.0, 8e-9), 8) == 0
