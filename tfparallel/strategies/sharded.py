"""Data parallel whose replicas share what each would hold alike (ZeRO, FSDP)."""

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.coordination.cluster import read_tf_config
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import check_devices
from tfparallel.segments.memory_policy import MemoryPolicy
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.in_one_process import LocalShardedExtended
from tfparallel.sharded.options import Sharding


class ShardedStrategy(KerasStrategy):
    """Data parallelism in which each replica keeps a part of the model's state.

    Trains to the same weights as one device. With `N` replicas each holds `1/N` of the optimizer's
    slots and, by default, of the weights, which are gathered where a layer needs them. Gradients
    are reduce-scattered.

    Where `TF_CONFIG` names workers, all of their devices are replicas. Whoever reads a weight there
    (`get_weights`, `save`), outside of a step, gathers it: all workers have to, in the same order.

    Args:
        devices: device names such as `["GPU:0", "GPU:1"]`; None takes all GPUs, or all logical
            CPUs where there are none. With `TF_CONFIG` it must be None.
        shard: what is kept in parts: "parameters" (weights, gradients and slots; ZeRO 3),
            "gradients" (ZeRO 2) or "optimizer" (slots only; ZeRO 1).
        min_size: weights of fewer numbers stay whole on each replica.
        units: the layers whose weights are gathered together, when they are called: "*" for each
            layer that has weights itself, or patterns of layers such as `{"block_*"}`, each with
            all layers in it. Weights of others are gathered where they are read, and kept.
        reshard_after_forward: whether gathered weights are freed after the forward pass, and
            gathered again for the backward pass: a third less memory at the peak, and half as much
            again sent.
        prefetch: how many units ahead weights are gathered.
        gather_dtype: weights are cast to it to be gathered, such as "bfloat16" under a policy of
            mixed precision, which computes with as many bits anyway.
        memory: which activations are computed again in the backward pass, a
            `tfparallel.MemoryPolicy`; None keeps all but those of layers made in a
            `keras.RematScope`. A layer that is computed again is a unit with all layers in it.

    Raises:
        ClusterConfigError: listing all that is wrong with `TF_CONFIG`, before a server starts.
        ValueError: for devices that do not exist or are named twice, and for another `shard`.

    Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
    models", https://arxiv.org/abs/1910.02054
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        shard: str = "parameters",
        min_size: int = 1024,
        units: str | Collection[str] = "*",
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        gather_dtype: str | None = None,
        memory: MemoryPolicy | None = None,
    ):
        sharding = Sharding(shard, min_size, units, reshard_after_forward, prefetch, gather_dtype)
        cluster = read_tf_config()
        if cluster is None:
            extended: Any = LocalShardedExtended(self, check_devices(devices), sharding)
        elif devices is None:
            extended = WorkersShardedExtended(self, cluster.cluster_resolver(), sharding)
        else:
            raise ValueError(
                "ShardedStrategy takes all devices of the workers of TF_CONFIG. Received: "
                f"devices={list(devices)}. Leave `devices` out, or TF_CONFIG."
            )
        extended._memory = memory or MemoryPolicy()
        super().__init__(extended)


class WorkersShardedExtended(ShardedExtended, MultiWorkerExtended):
    """Shards on the devices of all workers."""

    def __init__(
        self, container_strategy: tf.distribute.Strategy, cluster_resolver: Any, sharding: Sharding
    ):
        options = tf.distribute.experimental.CommunicationOptions()
        super().__init__(container_strategy, cluster_resolver, options, None, WorkerTimeouts())
        self._sharding = sharding

    def _host_gather_parts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device(self._host_device):
            if self._ring_all_reduce is not None:
                return self._ring_all_reduce.gather_each(parts)
            return [self._gather_rows(part) for part in parts]

    def _host_reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        if self._ring_all_reduce is None:  # all of the sum, of which the rest is thrown away
            return self._host_sum(rows)[self._id_in_cluster]
        with tf.device(self._host_device):
            return self._ring_all_reduce.reduce_scatter(rows)
