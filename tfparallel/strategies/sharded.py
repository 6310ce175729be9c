"""Data parallel whose replicas share what each would hold alike (ZeRO, FSDP)."""

from contextlib import AbstractContextManager

import keras

from tfparallel.checked_types import checks_types
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.hybrid.processes_of_job import processes_of_job
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.checks import check_is_model, devices_of_process
from tfparallel.replicas.device_names import Devices
from tfparallel.replicas.reporting_scope import ReportingScope
from tfparallel.segments.layer_paths import Patterns
from tfparallel.segments.memory_policy import MemoryPolicy
from tfparallel.sharded.extended import ShardedExtended
from tfparallel.sharded.in_one_process import LocalShardedExtended
from tfparallel.sharded.memory_table import MemoryTable, memory_table
from tfparallel.sharded.options import Sharding


@checks_types
class ShardedStrategy(KerasStrategy):
    """Data parallelism in which each replica keeps a part of the model's state.

    Trains to the same weights as one device. With `N` replicas each holds `1/N` of the optimizer's
    slots and, by default, of the weights, which are gathered where a layer needs them. Gradients
    are reduce-scattered.

    Where `TF_CONFIG` names workers, all of their devices are replicas; where `horovodrun` has
    started the process, all ranks are. Whoever reads a weight there (`get_weights`, `save`),
    outside of a step, gathers it: all workers have to, in the same order.

    Args:
        devices: device names such as `["GPU:0", "GPU:1"]`, or how many; None takes all GPUs, or all
            logical CPUs where there are none. Over several processes it must be None.
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
        host: what of the parts is in the host's memory: None for nothing, "optimizer" for the
            optimizer's slots, "parameters" for weights too. Optimizers update them on the host:
            for each device's parts a step sends gradients there, and weights there and back, or
            with "parameters" weights to each device, as often as they are gathered.
        memory: which activations are computed again in the backward pass, a
            `tfparallel.MemoryPolicy`; None keeps all but those of layers made in a
            `keras.RematScope`. A layer that is computed again is a unit with all layers in it.
        replicas: how many copies there are of what is in parts: of the devices of one process,
            neighbours share a copy; so do workers that are neighbours in `TF_CONFIG`. Parts are
            gathered within a copy, and gradients summed across copies (hybrid sharding): with a
            copy for each host, only these sums leave a host.
        transport: between processes: "ring" is this package's, between the workers of `TF_CONFIG`;
            "collectives" are TensorFlow's, between the same; "horovod" between its ranks. "auto" is
            Horovod in a process that `horovodrun` has started, else, where `TF_CONFIG` names
            workers, TensorFlow's by NCCL if they have GPUs and share one copy, or have one each,
            else the ring; else there is one process.
        prefetch_batches: how many batches are read and copied to the devices before their steps
            begin; a step on a GPU would wait for its copy otherwise. None: 2 on GPUs, else 0.
        timeouts: how long processes wait for one another; those of Horovod for `start_s` and
            `stall_s` of it (300 s without it). One process waits for nobody.

    Raises:
        ClusterConfigError: listing all that is wrong with `TF_CONFIG`, before a server starts.
        ImportError: if Horovod is not installed where it is asked for.
        ValueError: for devices that do not exist or are named twice, for another `shard` or
            `transport`, and for a number of `replicas` that devices cannot be divided by.
        WaitedTooLong: naming the processes that have not started.

    Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
    models", https://arxiv.org/abs/1910.02054
    """

    def __init__(
        self,
        devices: Devices | None = None,
        *,
        shard: str = "parameters",
        min_size: int = 1024,
        units: str | Patterns = "*",
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        gather_dtype: str | None = None,
        host: str | None = None,
        memory: MemoryPolicy | None = None,
        replicas: int = 1,
        transport: str = "auto",
        timeouts: WorkerTimeouts | None = None,
        prefetch_batches: int | None = None,
    ):
        sharding = Sharding(
            shard, min_size, units, reshard_after_forward, prefetch, gather_dtype, host
        )
        extended = _extended(self, devices, sharding, replicas, transport, timeouts)
        extended._memory = memory or MemoryPolicy()
        extended._read_ahead(prefetch_batches)
        super().__init__(extended)

    extended: ShardedExtended

    def scope(self) -> AbstractContextManager:
        """`tf.distribute.Strategy.scope`; errors in it name a rank of Horovod that has ended."""
        names = self.extended._names_lost_ranks() if self.num_workers > 1 else None
        return super().scope() if names is None else ReportingScope(super().scope(), names)

    def summary(self, model: keras.Model, inputs: object = None) -> MemoryTable:
        """What a step of `model` takes of each device of this process, in bytes; `print` it.

        Creates the optimizer's slots, if no step has done so yet. Nothing is gathered or sent.

        Args:
            model: built and compiled under this strategy.
            inputs: a batch of what it is called with, of all replicas; without it activations are
                not known.

        Raises:
            TypeError: for what is no model.
            ValueError: for a model that is not built.
        """
        check_is_model(model)
        with self.scope():
            return memory_table(self.extended, model, inputs)


def _extended(
    strategy: KerasStrategy,
    devices: Devices | None,
    sharding: Sharding,
    replicas: int,
    transport: str,
    timeouts: WorkerTimeouts | None,
) -> ShardedExtended:
    """What decides for the strategy, by what the processes of the job meet over."""
    job = processes_of_job(transport, timeouts)
    if job is not None:
        _check_takes_all(devices, job.name)
        return job.sharded(strategy, sharding, replicas)
    return LocalShardedExtended(strategy, devices_of_process(devices), sharding, replicas)


def _check_takes_all(devices: Devices | None, of: str) -> None:
    if devices is not None:
        raise ValueError(
            f"ShardedStrategy takes all devices of {of}. Received: devices={devices!r}. Leave "
            "`devices` out, or make the strategy in a process that is not of a job."
        )
