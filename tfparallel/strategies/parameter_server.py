"""Variables on parameter servers, computation on workers, one program on the chief."""

from collections.abc import Callable
from typing import Literal

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.compression_report import CompressionReport
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.coordination.cluster import read_tf_config
from tfparallel.coordination.security import check_network
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.data_parallel.mirrored import MirroredLocalExtended
from tfparallel.parameter_server.async_extended import AsyncParameterServerExtended
from tfparallel.parameter_server.compressed_gradient import checked_compressor
from tfparallel.parameter_server.extended import ParameterServerExtended
from tfparallel.parameter_server.server_cluster import ParameterServerCluster
from tfparallel.parameter_server.sync_extended import SyncParameterServerExtended
from tfparallel.replicas.base import KerasStrategy
from tfparallel.segments.memory_policy import MemoryPolicy


@checks_types
class ParameterServerStrategy(KerasStrategy):
    """Trains on the workers of a cluster, with the variables on its parameter servers.

    Drop-in for `tf.distribute.ParameterServerStrategy`, under Keras's `fit` too. Every task runs
    the same script. On a worker or a parameter server the constructor serves until the chief is
    done and then ends the process with status 0: what comes after it runs on the chief, and on the
    evaluator, where the strategy is that of one device
    (`tfparallel.parameter_server.evaluate_checkpoints`).

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` with a chief, workers
            and parameter servers; None reads `TF_CONFIG`.
        variable_partitioner: a `tf.distribute.experimental.partitioners.Partitioner`, or any
            function of shape and dtype that gives the number of parts along each dim; None keeps
            every variable in one piece.
        mode: "async": each device of a worker trains on batches of its own and hands its update in
            when it is done. "sync": all workers share each batch, which equals training on one
            device.
        max_staleness: "async" only. How many updates may be applied between the moment that a
            worker reads the weights and the moment that its own update is applied; None sets no
            bound.
        copy_every_steps: "sync" only. Parameter servers keep a second copy of all that training
            changes, and make it anew after so many steps. When a worker is lost, training waits
            until it is back, goes back to the copy and repeats the steps since. None keeps none:
            the loss of a worker then ends `fit`.
        compression: "async" only. How workers hand gradients in: one of `Cast`, `TopK`, `QSGD`,
            `TernGrad` and `SignSGD` of `tfparallel.compression`, or its name; None hands them in
            as they are.
        memory: which activations a worker computes again in the backward pass, a
            `tfparallel.MemoryPolicy`; None keeps all but those of layers made in a
            `keras.RematScope`.
        insecure_network: says that strangers cannot reach the network between the tasks. Needed
            for addresses other than loopback: TensorFlow's servers know no authentication.
        timeouts: how long tasks wait for one another.

    Raises:
        ClusterConfigError: listing all that is wrong with `TF_CONFIG`.
        ValueError: for a cluster without chief, workers or parameter servers, for addresses that
            other machines reach, and for wrong arguments.
        TimeoutError: on the chief, naming the tasks that never came.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Callable | None = None,
        mode: Literal["async", "sync"] = "async",
        max_staleness: int | None = None,
        insecure_network: bool = False,
        timeouts: Timeouts | None = None,
        compression: Compressor | str | None = None,
        copy_every_steps: int | None = 8,
        memory: MemoryPolicy | None = None,
    ):
        _check_arguments(mode, max_staleness, variable_partitioner, compression, copy_every_steps)
        compressor = checked_compressor(compression)
        if cluster_resolver is None and (config := read_tf_config()) is not None:
            cluster_resolver = config.cluster_resolver()
        cluster = ParameterServerCluster(cluster_resolver)
        check_network(cluster.tasks, insecure_network)
        timeouts = timeouts or Timeouts()
        self._cluster_resolver = cluster_resolver
        if cluster.task_type == "evaluator":  # works alone, on what the chief has saved
            alone = MirroredLocalExtended(self, ["GPU:0" if _has_gpu() else "CPU:0"])
            super().__init__(alone, (memory or MemoryPolicy()).during)
            return
        if cluster.is_server:
            cluster.serve(timeouts)
        cluster.connect(timeouts)
        extended: ParameterServerExtended
        if mode == "sync":
            extended = SyncParameterServerExtended(
                self, cluster, variable_partitioner, timeouts, copy_every_steps
            )
        else:
            extended = AsyncParameterServerExtended(
                self, cluster, variable_partitioner, max_staleness, timeouts, compressor
            )
        super().__init__(extended, (memory or MemoryPolicy()).during)

    def compression_report(self) -> list[CompressionReport]:
        """What a worker hands in in one step, for each optimizer that has trained."""
        extended = self.extended
        if not isinstance(extended, AsyncParameterServerExtended):
            return []
        return extended.compression_report()

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The cluster resolver of this strategy."""
        return self._cluster_resolver


def _has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def _check_arguments(
    mode: str,
    max_staleness: int | None,
    partitioner: object,
    compression: object,
    copy_every_steps: object = 8,
) -> None:
    if mode not in ("async", "sync"):
        raise ValueError(f'`mode` must be "async" or "sync". Received: {mode!r}.')
    if max_staleness is not None and mode == "sync":
        raise ValueError(
            'max_staleness is for mode="async": with mode="sync" no update is ever stale. '
            f"Received: max_staleness={max_staleness}."
        )
    if compression is not None and mode == "sync":
        raise ValueError(
            'compression is for mode="async". Received: '
            f'compression={compression!r}, mode="sync". MultiWorkerMirroredStrategy compresses '
            "gradients that are averaged."
        )
    if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
        raise ValueError(
            f"max_staleness must be an integer from 0, or None. Received: {max_staleness!r}."
        )
    if partitioner is not None and not callable(partitioner):
        raise ValueError(
            "variable_partitioner must be a function of shape and dtype, or None. Received: "
            f"{partitioner!r}."
        )
    if copy_every_steps is not None and (
        not isinstance(copy_every_steps, int) or copy_every_steps < 1
    ):
        raise ValueError(
            f"copy_every_steps must be an integer from 1, or None. Received: {copy_every_steps!r}."
        )
