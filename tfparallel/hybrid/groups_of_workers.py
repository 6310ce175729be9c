"""The two groups of a worker where there are several copies, each shared by several workers.

             shard 0        shard 1
    copy 0   worker 0  ---  worker 1      those that share a copy: parts are gathered
                |              |
    copy 1   worker 2  ---  worker 3      those that store the same part: its gradients are summed

Workers of a host are neighbours, so that what is gathered stays within it.

Source: Zhao et al., "PyTorch FSDP", https://arxiv.org/abs/2304.11277, section 3.2.2 (hybrid
sharding).
"""

from typing import NamedTuple


class WorkerGroup(NamedTuple):
    """Workers that have collectives of their own.

    Attributes:
        number: among all groups of the job: copies first, then parts.
        ranks: of its workers, in their order.
        of: what they have in common, as they tell one another.
    """

    number: int
    ranks: tuple[int, ...]
    of: str


def groups_around(rank: int, num_workers: int, num_copies: int) -> tuple[WorkerGroup, WorkerGroup]:
    """The group that shares a copy with `rank`, and the one that stores the same part."""
    num_sharing = num_workers // num_copies
    copy, part = divmod(rank, num_sharing)
    sharing = tuple(range(copy * num_sharing, (copy + 1) * num_sharing))
    alike = tuple(range(part, num_workers, num_sharing))
    return (
        WorkerGroup(copy, sharing, "a copy"),
        WorkerGroup(num_copies + part, alike, "a part of each copy"),
    )


def all_groups(num_workers: int, num_copies: int) -> list[WorkerGroup]:
    """Those of all workers, by number; none where the workers share one copy, or have one each."""
    if not 1 < num_copies < num_workers or num_workers % num_copies:
        return []
    around = [groups_around(rank, num_workers, num_copies) for rank in range(num_workers)]
    return sorted({group for both in around for group in both})


def check_copies(num_copies: int, num_workers: int, rank: int) -> None:
    """Refuses workers that cannot be divided among the copies.

    Raises:
        ValueError: with the rank that speaks.
    """
    if num_copies < 1 or num_workers % num_copies:
        raise ValueError(
            f"{num_workers} workers must be a multiple of the copies that they share. Received: "
            f"{num_copies} `replicas`. (Rank {rank} is speaking.)"
        )
