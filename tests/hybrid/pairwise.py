"""Few combinations in which any two values of different factors come together."""

import collections
import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence

Cell = tuple[Hashable, ...]


def pairwise(
    factors: Mapping[str, Sequence[Hashable]], never: Collection[tuple[Hashable, Hashable]] = ()
) -> list[Cell]:
    """Cells, a value of each factor, by which every pair of values is covered; always the same.

    Args:
        factors: the values of each, by its name.
        never: pairs of values that no cell has, the earlier factor's first.

    The greedy algorithm of Cohen et al. 1997, "The AETG system": each cell begins with a pair that
    is missing, and takes of each other factor the value that covers the most, of several the one
    that was taken least: so that triples differ too.
    """
    values = list(factors.values())
    positions = itertools.combinations(range(len(values)), 2)
    missing = {
        (i, a, j, b): None
        for i, j in positions
        for a in values[i]
        for b in values[j]
        if (a, b) not in never
    }  # in order
    cells = []
    uses: collections.Counter = collections.Counter()

    def rank(k: int, value: Hashable, chosen: Mapping[int, Hashable]) -> tuple[int, int]:
        return _new_pairs(k, value, chosen, missing), -uses[k, value]

    while missing:
        i, a, j, b = next(iter(missing))
        chosen: dict[int, Hashable] = {i: a, j: b}
        for k in range(len(values)):
            if k not in chosen:
                fitting = [v for v in values[k] if _fits(v, chosen.values(), never)]
                chosen[k] = max(fitting, key=lambda v, k=k: rank(k, v, chosen))
        uses.update(chosen.items())
        cell = tuple(chosen[k] for k in range(len(values)))
        for pair in _pairs(cell):
            missing.pop(pair, None)
        cells.append(cell)
    return cells


def _fits(value: Hashable, others: Collection[Hashable], never: Collection) -> bool:
    return not any((value, other) in never or (other, value) in never for other in others)


def _pairs(cell: Cell) -> list[tuple]:
    return [(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)]


def _new_pairs(k: int, value: Hashable, chosen: Mapping[int, Hashable], missing: Mapping) -> int:
    """How many missing pairs `value` of factor `k` makes with what is chosen."""
    pairs = [(i, a, k, value) if i < k else (k, value, i, a) for i, a in chosen.items()]
    return sum(pair in missing for pair in pairs)
