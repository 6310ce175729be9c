"""The processes of a job that a mesh goes over: the workers of `TF_CONFIG`, or Horovod's ranks."""

from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.local_sgd import LocalSGD, Meeting, as_meeting
from tfparallel.coordination.cluster import (
    ClusterConfig,
    is_started_by_horovodrun,
    read_tf_config,
)
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.hybrid.sharded_over_workers import WorkersShardedExtended
from tfparallel.mesh import Mesh
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.compressed_gradients import CompressedGradients, WorkersTransport
from tfparallel.replicas.device_names import count_devices_of_process
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.options import Sharding

TRANSPORTS = ("auto", "ring", "collectives", "horovod")
_STALL_TIMEOUT_S = 300.0  # as `HorovodStrategy`'s default


class GradientsCrossing(NamedTuple):
    """How gradients cross processes, and what is checked beside them.

    Attributes:
        compressor: what they are sent through; None sends them as they are.
        check_weights_every: after so many steps processes compare their weights; None never.
    """

    compressor: Compressor | None = None
    check_weights_every: int | None = None

    def refuse_beside_shared_state(self, mesh: Mesh) -> None:
        """Refuses either where processes share a copy of the state.

        Raises:
            ValueError: saying what is given, and what to take.
        """
        named = [f"{k}={v!r}" for k, v in self._asdict().items() if v is not None]
        if named:
            raise ValueError(
                "Where processes share a copy of the state, each gets its part of the gradients' "
                "sums, and has no weights to compare with another's. Received: "
                f"{', '.join(named)}, on a mesh of {mesh}. Leave that out, or name 'data' first, "
                "of a multiple of the processes."
            )


class ProcessesOfJob(Protocol):
    """Several processes, and what is between them.

    Attributes:
        name: for messages.
        share_by_one_device: whether those that share copies of the state use one device each.
    """

    name: str
    share_by_one_device: bool

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

    def around(self, strategy: KerasStrategy, crossing: GradientsCrossing) -> CompressedGradients:
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
        return _Workers(cluster, transport, timeouts or WorkerTimeouts())
    if transport != "auto":
        raise ValueError(
            f"transport={transport!r} is between the workers of TF_CONFIG. Received: none in it. "
            "Start the script with `tfparallel launch`, or leave `transport` out."
        )
    return None


class _Workers:
    """Those of `TF_CONFIG`."""

    name = "the workers of TF_CONFIG"
    share_by_one_device = False

    def __init__(self, cluster: ClusterConfig, transport: str, timeouts: WorkerTimeouts):
        self._cluster, self._transport, self._timeouts = cluster, transport, timeouts

    @property
    def num_processes(self) -> int:
        return self._cluster.num_workers

    @property
    def devices_each(self) -> int:
        return count_devices_of_process()

    def sharded(
        self, strategy: KerasStrategy, sharding: Sharding, num_copies: int
    ) -> ShardedExtended:
        resolver, transport = self._cluster.cluster_resolver(), self._transport
        return WorkersShardedExtended(
            strategy, resolver, sharding, transport, num_copies, self._timeouts
        )

    def around(self, strategy: KerasStrategy, crossing: GradientsCrossing) -> CompressedGradients:
        kinds = tf.distribute.experimental.CommunicationImplementation
        implementation = kinds.RING if self._transport == "collectives" else kinds.AUTO
        options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
        resolver = self._cluster.cluster_resolver()
        workers = MultiWorkerExtended(
            strategy, resolver, options, crossing.compressor, self._timeouts, has_inner=True
        )
        workers._check_weights(crossing.check_weights_every)
        return workers


class _Ranks:
    """Those of Horovod, which is imported when it is asked for something.

    It starts where the mesh is known: of ranks that share copies it makes groups as it starts.
    """

    name = "the ranks of Horovod"
    share_by_one_device = True

    def __init__(self, timeouts: WorkerTimeouts):
        self._timeouts = timeouts

    def _started(self) -> Any:
        from tfparallel.communication.horovod_start import hvd, start

        start(False, SENT_BUCKET_BYTES, self._timeouts.start_s)
        return hvd

    def _num_ranks(self) -> tuple[int, int]:
        from tfparallel.communication.horovod_start import num_ranks

        told = num_ranks()
        if told is not None:
            return told
        hvd = self._started()
        return hvd.size(), hvd.local_size()

    @property
    def num_processes(self) -> int:
        return self._num_ranks()[0]

    @property
    def devices_each(self) -> int:
        return count_devices_of_process(self._num_ranks()[1])

    def sharded(
        self, strategy: KerasStrategy, sharding: Sharding, num_copies: int
    ) -> ShardedExtended:
        from tfparallel.hybrid.sharded_over_ranks import RanksShardedExtended

        return RanksShardedExtended(strategy, sharding, num_copies, self._timeouts)

    def around(self, strategy: KerasStrategy, crossing: GradientsCrossing) -> CompressedGradients:
        from tfparallel.data_parallel.horovod import HorovodExtended

        ranks = self._started().global_process_set
        options = {"predivide": 1.0, "bucket_bytes": SENT_BUCKET_BYTES}
        workers = HorovodExtended(strategy, ranks, False, False, options, has_inner=True)
        transport = WorkersTransport(workers, ranks.rank(), ranks.size())
        workers._compress_gradients(crossing.compressor, transport)
        if self._timeouts.stall_s is not None:
            workers._watch_for_stalls(self._timeouts.stall_s)
        workers._check_weights(crossing.check_weights_every)
        return workers


def refuse_without_transport(**given: object) -> None:
    """Refuses what is said of several processes, for a mesh of one; None is nothing.

    Raises:
        ValueError: naming what is given, and where it belongs.
    """
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if named:
        raise ValueError(
            "Devices of one process wait for no other, and sum gradients as they are. Received: "
            f"{', '.join(named)} without `transport`, for a mesh of this process. Give `transport` "
            "for a mesh over all processes of a job, or give that to the strategy whose `inner` "
            "this one is."
        )


def gradients_crossing(
    compression: Meeting | str | None, check_weights_every: int | None
) -> GradientsCrossing:
    """What a user gives for gradients between the processes of a mesh, checked.

    Raises:
        ValueError: for a compression that is none, for rounds of local steps, and for a number of
            steps that is none.
    """
    meeting = as_meeting(compression)
    if isinstance(meeting, LocalSGD):
        raise ValueError(
            "Rounds of local steps average the weights of whole replicas. Received: "
            f"compression={compression!r} of a HybridStrategy. Take it in "
            "MultiWorkerMirroredStrategy or HorovodStrategy, without `inner`."
        )
    if check_weights_every is not None and check_weights_every < 1:
        raise ValueError(
            "check_weights_every is a number of steps, at least 1. Received: "
            f"{check_weights_every}."
        )
    return GradientsCrossing(meeting, check_weights_every)
