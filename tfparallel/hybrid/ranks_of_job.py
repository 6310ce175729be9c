"""The processes of a job as ranks that each trace their own part of one model."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES
from tfparallel.communication.collectives import LeftOutIfUnread
from tfparallel.coordination.cluster import read_tf_config
from tfparallel.coordination.ends_together import EndsTogether
from tfparallel.coordination.timeouts import Timeouts, WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.hybrid.collectives_of_groups import reduction_among
from tfparallel.hybrid.groups_of_workers import WorkerGroup, all_groups, groups_around
from tfparallel.hybrid.replicas_of_ranks import ReplicasOfRanks
from tfparallel.replicas.axis_of_processes import AxisOfProcesses
from tfparallel.tensor_parallel.ranks import ModelRanks

TRANSPORTS = ("ring", "horovod")
_STALL_TIMEOUT_S = 300.0  # as `HorovodStrategy`'s default


class JobOfRanks(NamedTuple):
    """Connected processes.

    Attributes:
        workers: they are these.
        devices: one of each, by names of which only that of this process is one of TensorFlow's.
        collectives: between all.
        among: those of some of them; all processes ask for their own groups together.
    """

    workers: AxisOfProcesses
    devices: Sequence[str]
    collectives: LeftOutIfUnread
    among: Callable[[WorkerGroup], LeftOutIfUnread]


def job_of_ranks(
    strategy: tf.distribute.Strategy,
    transport: str,
    layout: object,
    others: Mapping[str, object],
    timeouts: WorkerTimeouts | Timeouts | None,
    copies_of: Callable[[int], int],
) -> JobOfRanks:
    """The connected processes.

    Args:
        strategy: that they all make.
        transport: one of `TRANSPORTS`.
        layout: of the strategy.
        others: arguments of the strategy, by name, that must be None.
        timeouts: how long they wait for one another.
        copies_of: gives how many replicas so many ranks are.

    Raises:
        as `TensorParallelStrategy`.
    """
    if transport not in TRANSPORTS:
        raise ValueError(
            f"`transport` must be one of {TRANSPORTS}, or None. Received: {transport!r}. "
            "(TensorFlow's own collectives run whether something reads their result or not: ranks "
            "would gather each whole that they trace.)"
        )
    given = [name for name, value in others.items() if value is not None]
    if given or layout == "branches" or isinstance(layout, dict):
        raise ValueError(
            "With a `transport` each process traces its own part of each layer. Received: "
            f"{', '.join([*given, f'layout={layout!r}'])}. Take a LayoutMap or 'auto', without "
            "`memory`; for branches, let one process control the others (cluster_resolver=...)."
        )
    if isinstance(timeouts, Timeouts):
        raise TypeError(f"With a `transport` expected WorkerTimeouts. Received: {timeouts}.")
    if transport == "horovod":
        waits = timeouts or WorkerTimeouts(stall_s=_STALL_TIMEOUT_S)
        return _job_of_horovod(strategy, waits, copies_of)
    return _job_of_ring(strategy, timeouts or WorkerTimeouts())


def _job_of_ring(strategy: tf.distribute.Strategy, timeouts: WorkerTimeouts) -> JobOfRanks:
    cluster = read_tf_config()
    if cluster is None or cluster.num_workers < 2:
        raise ValueError(
            "transport='ring' is between the workers of TF_CONFIG. Received: none beside this one. "
            "Start the script with `tfparallel launch`, or leave `transport` out."
        )
    options = tf.distribute.experimental.CommunicationOptions()
    resolver = cluster.cluster_resolver()
    workers = MultiWorkerExtended(strategy, resolver, options, None, timeouts, has_inner=True)
    if workers._ring_all_reduce is None:
        raise ConnectionError(
            "Expected the workers to reach one another at free ports, for the ring. Received: "
            f"connections that were refused. (Rank {workers._id_in_cluster} is speaking.)"
        )
    of_rank = workers.worker_devices[0].rpartition("/")[2]
    devices = [f"{name}/{of_rank}" for name in workers._task_names]
    among = functools.partial(reduction_among, workers, timeouts=timeouts)
    return JobOfRanks(workers, devices, workers._ring_all_reduce, among)


def _job_of_horovod(
    strategy: tf.distribute.Strategy, timeouts: WorkerTimeouts, copies_of: Callable[[int], int]
) -> JobOfRanks:
    from tfparallel.communication.horovod_collectives import HorovodCollectives
    from tfparallel.communication.horovod_start import hvd, process_sets, start
    from tfparallel.data_parallel.horovod import HorovodExtended

    def groups(count: int) -> list[Sequence[int]]:
        return [group.ranks for group in all_groups(count, copies_of(count))]

    start(False, SENT_BUCKET_BYTES, timeouts.start_s, groups)
    rank, count = hvd.rank(), hvd.size()
    if count < 2:
        raise ValueError(
            "transport='horovod' is between the ranks of Horovod. Received: none beside this one. "
            "Start the script with `horovodrun`, or leave `transport` out."
        )
    sets = process_sets(groups(count))
    options = {"predivide": 1.0, "bucket_bytes": SENT_BUCKET_BYTES}
    everyone = hvd.global_process_set
    workers = HorovodExtended(strategy, everyone, False, False, options, has_inner=True)
    if sets:  # to take them apart Horovod asks all ranks, dead ones too, and aborts
        weakref.finalize(workers, EndsTogether(workers._agreement).stop)
    if timeouts.stall_s is not None:
        workers._watch_for_stalls(timeouts.stall_s)
    devices = [f"/job:rank/task:{i}/device:CPU:0" for i in range(count)]
    devices[rank] = workers.worker_devices[0]

    def among(group: WorkerGroup) -> LeftOutIfUnread:
        order = workers._collectives.order  # one of all: no two wait for each other
        return HorovodCollectives(sets[group.number], workers._host_device, order)

    return JobOfRanks(workers, devices, workers._collectives, among)


def ranks_of(job: JobOfRanks, num_parts: int) -> tuple[ModelRanks, ReplicasOfRanks | None]:
    """The same processes, as they exchange in a step; with others that compute other rows.

    Args:
        job: all processes.
        num_parts: how many neighbours compute one replica together.

    Returns:
        the ranks of this one's replica; and those that have its part of other replicas.
    """
    workers = job.workers
    agreement, host = workers._agreement, workers._host_device
    num_copies = workers._num_workers // num_parts
    if num_copies == 1:
        return ModelRanks(job.collectives, agreement, host), None
    sharing, alike = groups_around(workers._id_in_cluster, workers._num_workers, num_copies)
    ranks = ModelRanks(job.among(sharing), agreement.among(sharing.ranks), host)
    return ranks, ReplicasOfRanks(workers, ranks, job.among(alike), alike)
