"""Data parallel over several processes or hosts: each has all variables, gradients all-reduce."""

import tensorflow as tf

from tfparallel.communication.compression.compression_report import CompressionReport
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.compression.names import as_compressor
from tfparallel.coordination.cluster import read_tf_config
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.replicas.base import KerasStrategy


class MultiWorkerMirroredStrategy(KerasStrategy, tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous data parallelism over the workers of a cluster.

    Drop-in for `tf.distribute.MultiWorkerMirroredStrategy`. The batch size of `fit` is global.
    Every worker runs the same script with the same data and keeps the rows of its replicas; with
    `tf.data.Options.experimental_distribute.auto_shard_policy` FILE it reads only its files.

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; None reads
            `TF_CONFIG`.
        communication_options: a `tf.distribute.experimental.CommunicationOptions`.
        compression: how gradients cross workers: a compressor of `tfparallel.compression`, or its
            name, such as "fp16". None sends them as they are.
        timeouts: how long workers wait for one another; `timeout_seconds` of the options is its
            `stall_s`, where it is given.
        check_weights_every: after so many steps the workers compare a hash of their weights, and
            end with an error that names who has other ones. None compares nothing.

    Raises:
        ClusterConfigError: listing all that is wrong with `TF_CONFIG`, before a server starts.
        PortTakenError: if something else listens at this worker's address.
        WaitedTooLong: naming the workers that have not started, and what answers instead.
        ValueError: for a `compression` that is none.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        compression: Compressor | str | None = None,
        timeouts: WorkerTimeouts | None = None,
        check_weights_every: int | None = None,
    ):
        compressor = None if compression is None else as_compressor(compression)
        if cluster_resolver is None and (cluster := read_tf_config()) is not None:
            cluster_resolver = cluster.cluster_resolver()
        if communication_options is None:
            communication_options = tf.distribute.experimental.CommunicationOptions()
        super().__init__(
            MultiWorkerExtended(
                self,
                cluster_resolver,
                communication_options,
                compressor,
                timeouts or WorkerTimeouts(),
            )
        )
        self.extended._check_weights(check_weights_every)

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The cluster resolver of this strategy."""
        return self.extended._cluster_resolver

    def compression_report(self) -> list[CompressionReport]:
        """What compression sends, for each optimizer that has trained; printed, it is a table."""
        return self.extended.compression_report()
