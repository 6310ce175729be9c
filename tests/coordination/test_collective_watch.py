"""Who waits in a collective that somebody does not come to; the counts are the test's."""

import threading
import time

import pytest

from tfparallel.coordination.agreement import Agreement
from tfparallel.coordination.collective_watch import CollectiveWatch, Count

LIMIT_S = 0.8


class DictStore:
    """What workers write for one another, in this process."""

    def __init__(self):
        self.content = {}

    def put(self, key, value):
        return self.content.setdefault(key, value) is value

    def get(self, key, timeout_s):
        if key not in self.content:
            raise TimeoutError(key)
        return self.content[key]

    def describe(self, rank):
        return f"host{rank}:1"


class Rank:
    """A rank that is watched, where the test says that it is."""

    def __init__(self, store, rank, counts, num_ranks=3, limit_s=LIMIT_S):
        self.counts, self.text, self.ended = counts, "", threading.Event()
        agreement = Agreement(store, "test", rank, num_ranks)
        self.watch = CollectiveWatch(
            agreement, lambda: [Count(*each) for each in self.counts], limit_s, self._end
        )

    def _end(self, text):
        self.text = text
        self.ended.set()


@pytest.fixture
def start():
    ranks, store = [], DictStore()

    def start(rank, counts, **options):
        ranks.append(Rank(store, rank, counts, **options))
        return ranks[-1]

    start.store = store
    yield start
    for each in ranks:
        each.watch.stop()


def test_who_waits_names_those_that_have_not_come(start):
    waiting = [start(rank, [(4, 4), (7, 6)]) for rank in (0, 2)]
    start(1, [(4, 4), (6, 6)])
    for rank, each in zip((0, 2), waiting, strict=True):
        assert each.ended.wait(20)
        assert each.text == (
            "Expected rank 1 (host1:1) to come to a collective within 0.8 s. Received: nothing. "
            f"A longer stall_s allows for longer. (rank {rank} is speaking.)"
        )


def test_who_waits_in_a_group_names_those_of_it_that_have_not_come(start):
    """Of two copies, ranks 0, 1 and 2, 3: rank 3 comes to nothing, and rank 2 waits for it."""

    def counts(rank, of_copy, of_part):
        copy, part = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        return [(4, 4), (*of_copy, copy), (*of_part, part)]

    ranks = [
        start(0, counts(0, (8, 8), (5, 4)), num_ranks=4),
        start(1, counts(1, (8, 8), (5, 4)), num_ranks=4),
        start(2, counts(2, (8, 7), (4, 4)), num_ranks=4),
    ]
    start(3, counts(3, (7, 7), (4, 4)), num_ranks=4)
    for each, missing in zip(ranks, (2, 3, 3), strict=True):
        assert each.ended.wait(20)
        named = f"Expected rank {missing} (host{missing}:1), or one that it waits for, to come to"
        assert each.text.startswith(named), each.text


def test_where_all_have_come_it_is_the_transport(start):
    first, second = (start(rank, [(7, 6)], num_ranks=2) for rank in (0, 1))
    assert first.ended.wait(20) and second.ended.wait(20)
    assert "the transport between all ranks, which have all come," in first.text


def test_who_moves_or_waits_in_nothing_is_left_alone_and_writes_nothing(start):
    idle, moving = start(0, [(5, 5)]), start(1, [(0, 0)])
    deadline_s = time.monotonic() + 3 * LIMIT_S
    while time.monotonic() < deadline_s:
        moving.counts = [(moving.counts[0][0] + 1, moving.counts[0][0])]
        time.sleep(0.01)
    moving.counts = [(moving.counts[0][0], moving.counts[0][0])]
    assert not idle.ended.is_set() and not moving.ended.is_set()
    assert not start.store.content


def test_without_a_limit_nothing_is_ended(start):
    waiting = start(0, [(1, 0)], limit_s=None)
    assert not waiting.ended.wait(2 * LIMIT_S)
