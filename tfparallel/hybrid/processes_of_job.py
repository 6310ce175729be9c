"""The processes of a job that a mesh goes over: the workers of `TF_CONFIG`, or Horovod's ranks."""

from typing import Any, Protocol

import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES
from tfparallel.coordination.cluster import (
    ClusterConfig,
    is_started_by_horovodrun,
    read_tf_config,
)
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.hybrid.sharded_over_workers import WorkersShardedExtended
from tfparallel.replicas.axis_of_processes import AxisOfProcesses
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.device_names import count_devices_of_process
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.options import Sharding

TRANSPORTS = ("auto", "ring", "collectives", "horovod")
_STALL_TIMEOUT_S = 300.0  # as `HorovodStrategy`'s default


class ProcessesOfJob(Protocol):
    """Several processes, and what is between them."""

    name: str

    @property
    def num_processes(self) -> int:
        """How many they are."""

    @property
    def devices_each(self) -> int:
        """How many devices a process has."""

    def sharded(
        self, strategy: KerasStrategy, sharding: Sharding, num_copies: int
    ) -> ShardedExtended:
        """The `extended` of a strategy whose processes share copies of the state."""

    def around(self, strategy: KerasStrategy) -> AxisOfProcesses:
        """The axis of data over the processes, each of which has an `extended` of its own."""


def processes_of_job(transport: str, timeouts: WorkerTimeouts | None) -> ProcessesOfJob | None:
    """The job that this process is of, of which nothing has started; None for one by itself.

    Args:
        transport: between processes, one of `TRANSPORTS`.
        timeouts: how long processes wait for one another.

    Raises:
        ClusterConfigError: listing all that is wrong with `TF_CONFIG`.
        ValueError: for another transport, and for one of a job that there is not.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"`transport` must be one of {TRANSPORTS}. Received: {transport!r}.")
    if transport == "horovod" or (transport == "auto" and is_started_by_horovodrun()):
        return _Ranks(timeouts or WorkerTimeouts(stall_s=_STALL_TIMEOUT_S))
    cluster = read_tf_config()
    if cluster is not None:
        return _Workers(cluster, transport != "collectives", timeouts or WorkerTimeouts())
    if transport != "auto":
        raise ValueError(
            f"transport={transport!r} is between the workers of TF_CONFIG. Received: none in it. "
            "Start the script with `tfparallel launch`, or leave `transport` out."
        )
    return None


class _Workers:
    """Those of `TF_CONFIG`."""

    name = "the workers of TF_CONFIG"

    def __init__(self, cluster: ClusterConfig, uses_ring: bool, timeouts: WorkerTimeouts):
        self._cluster, self._uses_ring, self._timeouts = cluster, uses_ring, timeouts

    @property
    def num_processes(self) -> int:
        return self._cluster.num_workers

    @property
    def devices_each(self) -> int:
        return count_devices_of_process()

    def sharded(
        self, strategy: KerasStrategy, sharding: Sharding, num_copies: int
    ) -> ShardedExtended:
        resolver, ring = self._cluster.cluster_resolver(), self._uses_ring
        return WorkersShardedExtended(
            strategy, resolver, sharding, ring, num_copies, self._timeouts
        )

    def around(self, strategy: KerasStrategy) -> AxisOfProcesses:
        kinds = tf.distribute.experimental.CommunicationImplementation
        implementation = kinds.AUTO if self._uses_ring else kinds.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
        resolver = self._cluster.cluster_resolver()
        return MultiWorkerExtended(
            strategy, resolver, options, None, self._timeouts, has_inner=True
        )


class _Ranks:
    """Those of Horovod, which is started, and imported, when it is asked for something."""

    name = "the ranks of Horovod"

    def __init__(self, timeouts: WorkerTimeouts):
        self._timeouts = timeouts
        self._is_asked = False

    def _started(self) -> Any:
        from tfparallel.communication.horovod_collectives import hvd, start

        self._is_asked = True
        start(False, SENT_BUCKET_BYTES, self._timeouts.start_s)
        return hvd

    @property
    def num_processes(self) -> int:
        return self._started().size()

    @property
    def devices_each(self) -> int:
        return count_devices_of_process(self._started().local_size())

    def sharded(
        self, strategy: KerasStrategy, sharding: Sharding, num_copies: int
    ) -> ShardedExtended:
        if num_copies != 1 and self._is_asked:  # Horovod runs, without process sets of copies
            raise ValueError(
                "On a mesh of Horovod's ranks all share one copy: its axis 'shard' has all of "
                f"them. Received: {num_copies} copies, along 'data'. Take "
                f"ShardedStrategy(replicas={num_copies})."
            )
        from tfparallel.hybrid.sharded_over_ranks import RanksShardedExtended

        return RanksShardedExtended(strategy, sharding, num_copies, self._timeouts)

    def around(self, strategy: KerasStrategy) -> AxisOfProcesses:
        from tfparallel.data_parallel.horovod import HorovodExtended

        ranks = self._started().global_process_set
        options = {"predivide": 1.0, "bucket_bytes": SENT_BUCKET_BYTES}
        workers = HorovodExtended(strategy, ranks, False, False, options, has_inner=True)
        if self._timeouts.stall_s is not None:
            workers._watch_for_stalls(self._timeouts.stall_s)
        return workers
