"""Which nodes of a functional model's graph run together, in one call of a stage."""

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """A node.

    Attributes:
        stages: on which it runs: one, or several for a nested model that is divided.
        takes: names of the tensors that it needs.
        makes: names of the tensors that it gives.
    """

    stages: Collection[int]
    takes: Sequence[Hashable]
    makes: Sequence[Hashable]


def group_items(items: Sequence[Item], given: Iterable[Hashable]) -> list[list[int]]:
    """Groups of nodes, to be run one after another.

    All nodes of the first stage that can run make the first group, and so on; a node of several
    stages is a group of its own.

    Args:
        items: in an order in which they can run.
        given: names of the tensors that are there from the beginning.

    Returns:
        Indices of items. Those that lack a tensor for good are left out, as Keras does.
    """
    known, left, groups = set(given), list(range(len(items))), []
    while ready := [i for i in left if known.issuperset(items[i].takes)]:
        first = min(ready, key=lambda i: (min(items[i].stages), len(items[i].stages)))
        together = [first]
        if len(items[first].stages) == 1:
            together = _computable(items, left, known, items[first].stages)
        for i in together:
            known.update(items[i].makes)
        left = [i for i in left if i not in together]
        groups.append(together)
    return groups


def _computable(
    items: Sequence[Item], left: Iterable[int], known: set, stages: Collection[int]
) -> list[int]:
    """Those that run on `stages` only, and need nothing that another stage has yet to make."""
    known, computable = set(known), []
    for i in left:
        if set(items[i].stages) == set(stages) and known.issuperset(items[i].takes):
            computable.append(i)
            known.update(items[i].makes)
    return computable
