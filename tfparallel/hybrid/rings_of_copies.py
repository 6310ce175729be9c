"""The two rings of a worker where there are several copies, each shared by several workers.

             shard 0        shard 1
    copy 0   worker 0  ---  worker 1      those that share a copy: parts are gathered
                |              |
    copy 1   worker 2  ---  worker 3      those that store the same part: its gradients are summed

Workers of a host are neighbours, so that what is gathered stays within it.

Source: Zhao et al., "PyTorch FSDP", https://arxiv.org/abs/2304.11277, section 3.2.2 (hybrid
sharding).
"""

from tfparallel.communication.ring_all_reduce import RingAllReduce
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended


def ranks_around(rank: int, num_workers: int, num_copies: int) -> tuple[list[int], list[int]]:
    """The ranks that share a copy with `rank`, and those that store the same part."""
    num_sharing = num_workers // num_copies
    first = rank // num_sharing * num_sharing
    sharing = list(range(first, first + num_sharing))
    return sharing, list(range(rank % num_sharing, num_workers, num_sharing))


def open_rings(
    extended: MultiWorkerExtended, num_copies: int, timeouts: WorkerTimeouts
) -> tuple[RingAllReduce, RingAllReduce]:
    """Opens the rings of `ranks_around`; all workers call it together.

    Args:
        extended: of all workers, which have a ring.
        num_copies: divides the number of workers.
        timeouts: how long they wait for one another.

    Raises:
        OSError: if a worker could not reach another of its ring.
    """
    sharing, alike = ranks_around(extended._id_in_cluster, extended._num_workers, num_copies)
    of_copy = extended._ring_among(sharing, "a copy", timeouts)
    return of_copy, extended._ring_among(alike, "a part of each copy", timeouts)
