"""The processes of `TF_CONFIG` as ranks that each trace their own part of one model."""

from collections.abc import Mapping

import tensorflow as tf

from tfparallel.coordination.cluster import read_tf_config
from tfparallel.coordination.timeouts import Timeouts, WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.hybrid.collectives_of_groups import reduction_among
from tfparallel.hybrid.groups_of_workers import groups_around
from tfparallel.hybrid.replicas_of_ranks import ReplicasOfRanks
from tfparallel.tensor_parallel.ranks import ModelRanks


def job_of_ranks(
    strategy: tf.distribute.Strategy,
    transport: str,
    layout: object,
    others: Mapping[str, object],
    timeouts: WorkerTimeouts | Timeouts | None,
) -> MultiWorkerExtended:
    """The connected processes, with a ring.

    Args:
        strategy: that they all make.
        transport: "ring".
        layout: of the strategy.
        others: arguments of the strategy, by name, that must be None.
        timeouts: how long they wait for one another.

    Raises:
        as `TensorParallelStrategy`.
    """
    if transport != "ring":
        raise ValueError(f"`transport` must be 'ring' or None. Received: {transport!r}.")
    given = [name for name, value in others.items() if value is not None]
    if given or layout == "branches" or isinstance(layout, dict):
        raise ValueError(
            "With a `transport` each process traces its own part of each layer. Received: "
            f"{', '.join([*given, f'layout={layout!r}'])}. Take a LayoutMap or 'auto', without "
            "`memory`; for branches, let one process control the others (cluster_resolver=...)."
        )
    if isinstance(timeouts, Timeouts):
        raise TypeError(f"With a `transport` expected WorkerTimeouts. Received: {timeouts}.")
    cluster = read_tf_config()
    if cluster is None or cluster.num_workers < 2:
        raise ValueError(
            "transport='ring' is between the workers of TF_CONFIG. Received: none beside this one. "
            "Start the script with `tfparallel launch`, or leave `transport` out."
        )
    options = tf.distribute.experimental.CommunicationOptions()
    job = MultiWorkerExtended(
        strategy,
        cluster.cluster_resolver(),
        options,
        None,
        timeouts or WorkerTimeouts(),
        has_inner=True,
    )
    if job._ring_all_reduce is None:
        raise ConnectionError(
            "Expected the workers to reach one another at free ports, for the ring. Received: "
            f"connections that were refused. (Rank {job._id_in_cluster} is speaking.)"
        )
    return job


def ranks_of(
    job: MultiWorkerExtended, num_parts: int, timeouts: WorkerTimeouts | None
) -> tuple[ModelRanks, ReplicasOfRanks | None]:
    """The same processes, as they exchange in a step; with others that compute other rows.

    Args:
        job: all processes.
        num_parts: how many neighbours compute one replica together.
        timeouts: how long they wait for one another.

    Returns:
        the ranks of this one's replica; and those that have its part of other replicas.
    """
    assert job._ring_all_reduce is not None
    num_copies = job._num_workers // num_parts
    if num_copies == 1:
        return ModelRanks(job._ring_all_reduce, job._agreement, job._host_device), None
    waits = timeouts or WorkerTimeouts()
    sharing, alike = groups_around(job._id_in_cluster, job._num_workers, num_copies)
    of_replica = reduction_among(job, sharing, waits)
    ranks = ModelRanks(of_replica, job._agreement.among(sharing.ranks), job._host_device)
    return ranks, ReplicasOfRanks(job, ranks, reduction_among(job, alike, waits), alike)
