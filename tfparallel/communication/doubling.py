"""Recursive doubling: who exchanges sums with whom, so that all have the whole after log2 N steps.

Ranks are paired with those 1, 2, 4 ... away; both of a pair send all they have and add what comes:

    rank    0   1   2   3   4   5   6   7
    step 0  0-1     2-3     4-5     6-7
    step 1  0---2   1---3   4---6   5---7      (pairs 0-2, 1-3, 4-6, 5-7)
    step 2  0-------4  ...                     (pairs 0-4, 1-5, 2-6, 3-7)

If N is no power of two, as many of the first ranks as are too many fold in pairs: the even one
gives its array to the odd one before, and is handed the sum after.

    N = 5   before: 0 -> 1     doubling among 1, 2, 3, 4     after: 1 -> 0

A pair always adds the lower rank's sum first, so that both, and with them all, have the same bits.

What is too large to be sent whole so often is halved: each of a pair sums one half, with its next
partner a half of that, and so on; then all are handed back in the same pairs, the last one first.

    bytes 0..7   rank   0      1      2      3
    halving             0..3   4..7   0..3   4..7     pairs 0-1, 2-3
                        0..1   4..5   2..3   6..7     pairs 0-2, 1-3
    and back            0..3   4..7   0..3   4..7     pairs 0-2, 1-3
                        all    all    all    all      pairs 0-1, 2-3

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 2005; MPICH, src/mpi/coll/allreduce/allreduce_intra_recursive_doubling.c and
allreduce_intra_reduce_scatter_allgather.c.
"""

from typing import NamedTuple


class Exchange(NamedTuple):
    """What one rank does in one step.

    Attributes:
        partner: with which rank.
        sends: whether it sends what it has.
        receives: whether it receives what the partner has.
        adds: whether it adds that to its own; else it takes it instead.
    """

    partner: int
    sends: bool
    receives: bool
    adds: bool


def all_reduce_exchanges(rank: int, num_workers: int) -> list[Exchange]:
    """What `rank` does, in order, in an all-reduce of `num_workers` ranks."""
    num_pairs = num_workers - _power_of_two(num_workers)  # that fold
    if rank < 2 * num_pairs and rank % 2 == 0:
        return [Exchange(rank + 1, True, False, False), Exchange(rank + 1, False, True, False)]
    exchanges = [Exchange(each, True, True, True) for each in _doubling(rank, num_workers)]
    if rank < 2 * num_pairs:
        before, after = (
            Exchange(rank - 1, False, True, True),
            Exchange(rank - 1, True, False, False),
        )
        return [before, *exchanges, after]
    return exchanges


class PartExchange(NamedTuple):
    """What one rank does in one step with parts of what it has.

    Attributes:
        partner: with which rank.
        sent: the part that it sends, if any.
        received: the part that it receives, if any.
        adds: whether it adds that to its own; else it takes it instead.
    """

    partner: int
    sent: slice | None
    received: slice | None
    adds: bool


def halving_exchanges(rank: int, num_workers: int, size: int) -> list[PartExchange]:
    """What `rank` does, in order, in an all-reduce of `size` numbers by halves."""
    whole = own = slice(0, size)
    before: list[PartExchange] = []
    back: list[PartExchange] = []
    folds: list[PartExchange] = []
    for partner, sends, receives, adds in all_reduce_exchanges(rank, num_workers):
        if not (sends and receives):
            fold = PartExchange(
                partner, whole if sends else None, whole if receives else None, adds
            )
            (folds if back or folds else before).append(fold)
            continue
        middle = (own.start + own.stop) // 2
        halves = slice(own.start, middle), slice(middle, own.stop)
        own, others = halves if rank < partner else halves[::-1]
        before.append(PartExchange(partner, others, own, True))
        back.append(PartExchange(partner, own, others, False))
    return [*before, *reversed(back), *folds]


def num_steps(num_workers: int) -> int:
    """How many messages follow one another until the last rank has the sum."""
    power = _power_of_two(num_workers)
    return power.bit_length() - 1 + (2 if power < num_workers else 0)


def _power_of_two(num_workers: int) -> int:
    """The largest one that is not more."""
    return 1 << (num_workers.bit_length() - 1)


def _doubling(rank: int, num_workers: int) -> list[int]:
    """Partners of a rank that is left after the fold."""
    power = _power_of_two(num_workers)
    num_pairs = num_workers - power
    place = rank // 2 if rank < 2 * num_pairs else rank - num_pairs
    places = [place ^ (1 << step) for step in range(power.bit_length() - 1)]
    return [2 * each + 1 if each < num_pairs else each + num_pairs for each in places]
