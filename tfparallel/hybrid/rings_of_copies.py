"""The two rings of a worker where there are several copies, each shared by several workers.

             shard 0        shard 1
    copy 0   worker 0  ---  worker 1      those that share a copy: parts are gathered
                |              |
    copy 1   worker 2  ---  worker 3      those that store the same part: its gradients are summed

Workers of a host are neighbours, so that what is gathered stays within it.

Source: Zhao et al., "PyTorch FSDP", https://arxiv.org/abs/2304.11277, section 3.2.2 (hybrid
sharding).
"""

from collections.abc import Sequence
from typing import Any

from tfparallel.communication.alpha_beta import SMALL_BYTES
from tfparallel.communication.ring_all_reduce import RingAllReduce
from tfparallel.communication.ring_opening import connect_ring
from tfparallel.coordination.timeouts import WorkerTimeouts


def copy_and_part_groups(
    rank: int, num_workers: int, num_copies: int
) -> tuple[list[int], list[int]]:
    """The ranks that share a copy with `rank`, and those that store the same part."""
    num_sharing = num_workers // num_copies
    first = rank // num_sharing * num_sharing
    sharing = list(range(first, first + num_sharing))
    return sharing, list(range(rank % num_sharing, num_workers, num_sharing))


def open_rings(
    extended: Any, num_copies: int, timeouts: WorkerTimeouts
) -> tuple[RingAllReduce, RingAllReduce]:
    """Opens the rings of `copy_and_part_groups`; all workers call it together.

    Args:
        extended: of all workers, which have a ring.
        num_copies: divides the number of workers.
        timeouts: how long they wait for one another.

    Raises:
        OSError: if a worker could not reach another of its ring.
    """
    rank, num_workers = extended._id_in_cluster, extended._num_workers
    sharing, alike = copy_and_part_groups(rank, num_workers, num_copies)
    return (
        _opened(extended, "a copy", sharing, timeouts),
        _opened(extended, "a part of each copy", alike, timeouts),
    )


def _opened(
    extended: Any, of: str, ranks: Sequence[int], timeouts: WorkerTimeouts
) -> RingAllReduce:
    def exchange(what: str, value: object) -> list:
        told = extended._agreement.exchange(f"{what} of {of}", value)
        return [told[rank] for rank in ranks]

    ring = connect_ring(
        ranks.index(extended._id_in_cluster),
        len(ranks),
        extended._own_host,
        exchange,
        timeouts.stall_s,
        extended._watch,
        [extended._task_names[rank] for rank in ranks],
        SMALL_BYTES,
        timeouts.silent_s,
    )
    return extended._of_some_workers(ring, len(ranks))
