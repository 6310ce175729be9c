"""Collectives of some of the workers of `TF_CONFIG`, beside those that all of them have."""

from tfparallel.communication.alpha_beta import SMALL_BYTES
from tfparallel.communication.ring_all_reduce import RingAllReduce
from tfparallel.communication.ring_collectives import RingCollectives
from tfparallel.communication.ring_opening import connect_ring
from tfparallel.communication.stock_collectives import StockCollectives
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.hybrid.groups_of_workers import WorkerGroup

_FIRST_KEY = 100  # of groups, within the 1,000 of a strategy; all workers together have the first


def ring_among(
    extended: MultiWorkerExtended, group: WorkerGroup, timeouts: WorkerTimeouts
) -> RingCollectives:
    """Those of `reduction_among`."""
    reduction = reduction_among(extended, group, timeouts)
    index, size = group.ranks.index(extended._id_in_cluster), len(group.ranks)
    return RingCollectives(reduction, extended._host_device, size, index)


def reduction_among(
    extended: MultiWorkerExtended, group: WorkerGroup, timeouts: WorkerTimeouts
) -> RingAllReduce:
    """A ring of this worker's group; all workers open theirs together, each its own.

    Args:
        extended: of all workers, which have a ring.
        group: this worker's.
        timeouts: how long they wait for one another.

    Raises:
        OSError: if one could not reach another.
    """

    def exchange(what: str, value: object) -> list:
        told = extended._agreement.exchange(f"{what} of {group.of}", value)
        return [told[rank] for rank in group.ranks]

    index, size = group.ranks.index(extended._id_in_cluster), len(group.ranks)
    ring = connect_ring(
        index,
        size,
        extended._own_host,
        exchange,
        timeouts.stall_s,
        extended._watch,
        [extended._task_names[rank] for rank in group.ranks],
        SMALL_BYTES,
        timeouts.silent_s,
        group.ranks,
    )
    return extended._all_reduce_through(ring, size)


def stock_among(extended: MultiWorkerExtended, group: WorkerGroup) -> StockCollectives:
    """TensorFlow's collectives of this worker's group, which it knows by a key.

    Args:
        extended: of all workers.
        group: this worker's.
    """
    operations = extended._operations_among(_FIRST_KEY + group.number, group.ranks)
    index, size = group.ranks.index(extended._id_in_cluster), len(group.ranks)
    return StockCollectives(operations, extended._host_device, size, index)
