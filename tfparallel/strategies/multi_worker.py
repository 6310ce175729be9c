"""Data parallel over several processes or hosts: each has all variables, gradients all-reduce."""

from collections.abc import Callable

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.compression_report import CompressionReport
from tfparallel.communication.local_sgd import Meeting, as_meeting
from tfparallel.coordination.cluster import read_tf_config
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.data_parallel.worker_collectives import CommunicationOptions
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.inner import inside_of, made
from tfparallel.segments.memory_policy import MemoryPolicy, around_inner


@checks_types
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
        inner: a function that makes the strategy of a worker's devices, such as
            `lambda: PipelineStrategy(["GPU:0", "GPU:1"])`: it is called when TensorFlow's server
            is there. Default: every device is a replica.
        memory: which activations are computed again in the backward pass, a
            `tfparallel.MemoryPolicy`; None keeps all but those of layers made in a
            `keras.RematScope`. With `inner` it is given to that.
        prefetch_batches: how many batches are read and copied to the devices before their steps
            begin; a step on a GPU would wait for its copy otherwise. None: 2 on GPUs, else 0.

    Raises:
        ClusterConfigError: listing all that is wrong with `TF_CONFIG`, before a server starts.
        PortTakenError: if something else listens at this worker's address.
        WaitedTooLong: naming the workers that have not started, and what answers instead.
        TypeError: for an `inner` that makes no strategy of one process.
        ValueError: for a `compression` that is none, and for `memory` beside `inner`.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        compression: Meeting | str | None = None,
        timeouts: WorkerTimeouts | None = None,
        check_weights_every: int | None = None,
        inner: Callable[[], KerasStrategy] | KerasStrategy | None = None,  # a strategy is refused
        memory: MemoryPolicy | None = None,
        prefetch_batches: int | None = None,
    ):
        kept_in_step_of = around_inner(memory, inner)
        if isinstance(inner, KerasStrategy):
            raise TypeError(
                "TensorFlow's server has to start before a strategy looks for devices, so `inner` "
                f"must be a function. Received: {inner}. Pass lambda: {type(inner).__name__}(...)."
            )
        compressor = as_meeting(compression)
        if cluster_resolver is None and (cluster := read_tf_config()) is not None:
            cluster_resolver = cluster.cluster_resolver()
        if communication_options is None:
            communication_options = tf.distribute.experimental.CommunicationOptions()
        workers = MultiWorkerExtended(
            self,
            cluster_resolver,
            communication_options,
            compressor,
            timeouts or WorkerTimeouts(),
            has_inner=inner is not None,
        )
        workers._check_weights(check_weights_every)
        self._workers = workers
        self.inner = None if inner is None else made(inner)
        extended = workers if self.inner is None else inside_of(self, self.inner, workers)
        if inner is None or prefetch_batches is not None:
            extended._read_ahead(prefetch_batches)
        super().__init__(extended, kept_in_step_of)

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The cluster resolver of this strategy."""
        return self._workers._cluster_resolver

    def compression_report(self) -> list[CompressionReport]:
        """What compression sends, for each optimizer that has trained; printed, it is a table."""
        return self._workers.compression_report()
