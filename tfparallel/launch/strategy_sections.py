"""What a YAML file may say of a strategy: one section for each, with its arguments.

Imports no TensorFlow, so that mistakes in a file show at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import Field, model_validator

from tfparallel.communication.bucketing import HOROVOD_BUCKET_BYTES
from tfparallel.launch.option_sections import (
    Communication,
    Compression,
    Memory,
    Partitioner,
    Section,
    WaitLimits,
)

DeviceName = Annotated[str, Field(min_length=1)]
DeviceNames = Annotated[list[DeviceName], Field(min_length=1)]


def worker_timeouts(given: WaitLimits | None) -> object:
    """The `tfparallel.WorkerTimeouts` that a file asks for; None for none."""
    import tfparallel

    return None if given is None else tfparallel.WorkerTimeouts(**given.model_dump())


class StrategySection(Section):
    """How the run is divided: the name of a strategy, next to its keyword arguments."""

    name: str
    class_name: ClassVar[str]

    def arguments(self) -> dict[str, object]:
        """Return the keyword arguments of `tfparallel.<class_name>`."""
        return self.model_dump(exclude={"name", "memory", "prefetch_batches"})


class WithMemory(StrategySection):
    """A strategy whose activations may be computed again, or wait on the host."""

    memory: Memory | None = None


class PlacesBatches(WithMemory):
    """A strategy that may place batches on devices ahead of their steps."""

    prefetch_batches: int | None = Field(default=None, ge=0)


class WithTimeouts(PlacesBatches):
    """A strategy of several workers, which wait for one another."""

    timeouts: WaitLimits | None = None

    def arguments(self) -> dict[str, object]:
        return {**super().arguments(), "timeouts": worker_timeouts(self.timeouts)}


class OneDevice(PlacesBatches):
    """`device` None is the first GPU, or the CPU where there is none."""

    class_name = "OneDeviceStrategy"
    name: Literal["one_device"]
    device: DeviceName | None = None

    def arguments(self) -> dict[str, object]:
        import tensorflow as tf

        default = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
        return {"device": self.device or default}


class Mirrored(PlacesBatches):
    """`devices` None is all GPUs, or all logical CPUs where there is none."""

    class_name = "MirroredStrategy"
    name: Literal["mirrored"]
    devices: DeviceNames | None = None
    cross_device_ops: Literal["nccl", "hierarchical_copy", "reduction_to_one_device"] | None = None

    def arguments(self) -> dict[str, object]:
        import tensorflow as tf

        cross_device_ops = {
            None: lambda: None,
            "nccl": tf.distribute.NcclAllReduce,
            "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
            "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
        }
        return {
            "devices": self.devices,
            "cross_device_ops": cross_device_ops[self.cross_device_ops](),
        }


class Sharded(WithTimeouts):
    """`devices` as of `Mirrored`, of one process; the rest as of `ShardedStrategy`."""

    class_name = "ShardedStrategy"
    name: Literal["sharded"]
    devices: DeviceNames | None = None
    shard: Literal["parameters", "gradients", "optimizer"] = "parameters"
    min_size: int = Field(default=1024, ge=1)
    units: str | list[str] = "*"
    reshard_after_forward: bool = True
    prefetch: int = Field(default=1, ge=0)
    gather_dtype: str | None = None
    host: Literal["optimizer", "parameters"] | None = None
    replicas: int = Field(default=1, ge=1)
    transport: Literal["auto", "ring", "collectives", "horovod"] = "auto"


class TensorParallel(WithMemory):
    """`layout`: "auto", or for patterns of paths of weights, "model" or None for each dim.

    `devices` None is all GPUs, or all logical CPUs where there is none; `replicas` of them go on
    the axis "batch", the rest of each replica on "model". With `transport` these are the processes
    of `TF_CONFIG`, or Horovod's ranks.
    """

    class_name = "TensorParallelStrategy"
    name: Literal["tensor_parallel"]
    devices: DeviceNames | None = None
    replicas: int = Field(default=1, ge=1)
    layout: Literal["auto"] | dict[str, list[Literal["model"] | None]] = Field(default_factory=dict)
    sequence_parallel: bool = False
    transport: Literal["ring", "horovod"] | None = None
    check_weights_every: int | None = Field(default=None, ge=1)  # with `transport`
    timeouts: WaitLimits | None = None  # with `transport`

    @model_validator(mode="after")
    def _suits_its_processes(self) -> TensorParallel:
        given = self.model_dump(exclude_defaults=True)
        between = [key for key in ("timeouts", "check_weights_every") if key in given]
        if self.transport is None and between:
            raise ValueError(f"{', '.join(between)}: of processes. Received: no transport")
        alone = [key for key in ("devices", "memory") if key in given]
        if self.transport is not None and alone:
            raise ValueError(
                f"transport={self.transport} is between processes, which keep all activations. "
                f"Received: also {', '.join(alone)}"
            )
        return self

    def arguments(self) -> dict[str, object]:
        import keras

        devices = self._devices()
        if len(devices) % self.replicas:
            raise ValueError(
                f"`replicas` must divide the number of devices. Received: {self.replicas} replicas "
                f"of {len(devices)} devices."
            )
        shape = (self.replicas, len(devices) // self.replicas)
        mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), devices)
        arguments: dict[str, object] = {"sequence_parallel": self.sequence_parallel}
        if self.transport is not None:
            arguments |= {"transport": self.transport, "timeouts": worker_timeouts(self.timeouts)}
            arguments["check_weights_every"] = self.check_weights_every
        if isinstance(self.layout, str):
            return {**arguments, "layout": self.layout, "device_mesh": mesh}
        layout = keras.distribution.LayoutMap(mesh)
        for pattern, axes in self.layout.items():
            layout[pattern] = tuple(axes)
        return {**arguments, "layout": layout}

    def _devices(self) -> list[str]:
        """As a mesh calls them; of processes by their numbers, as TensorFlow has not started."""
        if self.transport == "horovod":
            from tfparallel.communication.horovod_start import num_ranks

            told = num_ranks()
            return [f"cpu:{i}" for i in range(1 if told is None else told[0])]
        if self.transport is not None:
            from tfparallel.coordination.cluster import read_tf_config

            cluster = read_tf_config()
            return [f"cpu:{i}" for i in range(1 if cluster is None else cluster.num_workers)]
        from tfparallel.replicas.device_names import all_devices_here

        devices = self.devices or all_devices_here()
        return [device.removeprefix("/device:").lower() for device in devices]


class MultiWorkerMirrored(WithTimeouts):
    """Which worker this process is comes from `TF_CONFIG`, so that all hosts share one file."""

    class_name = "MultiWorkerMirroredStrategy"
    name: Literal["multi_worker_mirrored"]
    communication: Communication = Communication()
    compression: Compression = Compression()

    def arguments(self) -> dict[str, object]:
        import tensorflow as tf

        options = self.communication.model_dump()
        return {
            "timeouts": super().arguments()["timeouts"],
            "communication_options": tf.distribute.experimental.CommunicationOptions(**options),
            "compression": self.compression.compressor(),
        }


class Horovod(PlacesBatches):
    """Which rank a process is comes from `horovodrun`, so that all hosts share one file."""

    class_name = "HorovodStrategy"
    name: Literal["horovod"]
    compression: Compression = Compression()
    reduction: Literal["ring", "hierarchical", "adasum"] = "ring"
    bucket_bytes: int = Field(default=HOROVOD_BUCKET_BYTES, ge=1)
    stall_timeout_s: float | None = Field(default=300.0, gt=0)
    start_timeout_s: float | None = Field(default=600.0, gt=0)

    def arguments(self) -> dict[str, object]:
        return {
            "stall_timeout_s": self.stall_timeout_s,
            "start_timeout_s": self.start_timeout_s,
            "compression": self.compression.compressor(),
            "reduction": self.reduction,
            "bucket_bytes": self.bucket_bytes,
        }


class CentralStorage(PlacesBatches):
    """`compute_devices` None is all GPUs, or all logical CPUs where there is none."""

    class_name = "CentralStorageStrategy"
    name: Literal["central_storage"]
    compute_devices: DeviceNames | None = None
    parameter_device: DeviceName | None = None


class ParameterServer(StrategySection):
    """Which task a process is comes from `TF_CONFIG`, so that all hosts share one file."""

    class_name = "ParameterServerStrategy"
    name: Literal["parameter_server"]
    mode: Literal["async", "sync"] = "async"
    max_staleness: int | None = Field(default=None, ge=0)
    partitioner: Partitioner | None = None
    compression: Compression = Compression()  # of what asynchronous workers hand in
    copy_every_steps: int | None = Field(default=8, ge=1)
    insecure_network: bool = False

    def arguments(self) -> dict[str, object]:
        return {
            "mode": self.mode,
            "max_staleness": self.max_staleness,
            "variable_partitioner": self.partitioner and self.partitioner.partitioner(),
            "compression": self.compression.compressor(),
            "copy_every_steps": self.copy_every_steps,
            "insecure_network": self.insecure_network,
        }


class PipelineSection(Section):
    """`partition` is "balanced", or for each stage a list of patterns of layer names."""

    num_microbatches: int | None = Field(default=None, ge=1)
    schedule: Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    chunks_per_device: int | None = Field(default=None, ge=2)
    num_stages: int | None = Field(default=None, ge=1)
    partition: Literal["balanced"] | list[list[str]] = "balanced"
    memory_limit_bytes: int | None = Field(default=None, ge=1)
    batch_norm: Literal["per_microbatch", "deferred"] = "per_microbatch"
    rematerialize: Literal["none", "except_last", "full"] | list[str] = "none"
    offload: bool = False


class Pipeline(PipelineSection, WithMemory):
    """A pipeline on devices of one process, or of several tasks in TF_CONFIG."""

    class_name = "PipelineStrategy"
    name: Literal["pipeline"]
    devices: DeviceNames | None = None
    insecure_network: bool = False  # with several tasks in TF_CONFIG


class ShardSection(Section):
    """What is in parts."""

    shard: Literal["parameters", "gradients", "optimizer"] = "parameters"
    min_size: int = Field(default=1024, ge=1)


class Hybrid(WithTimeouts):
    """`mesh`: the size of each axis, None: all on "data"; `layout`: as `TensorParallel`'s.

    With `transport` it is a mesh of the devices of all processes of a job.
    """

    class_name = "HybridStrategy"
    name: Literal["hybrid"]
    mesh: dict[Literal["data", "shard", "pipeline", "model"], int] | None = None
    pipeline: PipelineSection | None = None
    shard: ShardSection | None = None
    layout: dict[str, list[Literal["model"] | None]] = Field(default_factory=dict)
    transport: Literal["auto", "ring", "collectives", "horovod"] | None = None
    compression: Compression = Compression()
    check_weights_every: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_a_mesh_over_processes(self) -> Hybrid:
        if self.transport is not None and self.mesh is None:
            raise ValueError(
                f"transport={self.transport} is between the processes whose devices `mesh` has. "
                "Received: no mesh"
            )
        return self

    def arguments(self) -> dict[str, object]:
        import keras

        import tfparallel
        from tfparallel.replicas.device_names import all_devices_here

        all_on_data = {"data": len(all_devices_here())}
        layout: Any = keras.distribution.LayoutMap() if self.layout else None
        for pattern, axes in self.layout.items():
            layout[pattern] = keras.distribution.TensorLayout(axes)
        options = self.pipeline and tfparallel.PipelineOptions(**self.pipeline.model_dump())
        return {
            "mesh": dict(self.mesh or all_on_data),
            "pipeline": options,
            "shard": self.shard and tfparallel.Sharding(**self.shard.model_dump()),
            "layout_map": layout,
            "transport": self.transport,
            "timeouts": super().arguments()["timeouts"],
            "compression": self.compression.compressor(),
            "check_weights_every": self.check_weights_every,
        }


class Tpu(StrategySection):
    """`tpu` is the TPU's name or address; "local" is the TPU of a TPU VM.

    `batch_rows` is how many rows a batch has at most, for data that does not tell.
    """

    class_name = "TPUStrategy"
    name: Literal["tpu"]
    tpu: DeviceName = "local"
    batch_rows: int | None = None


# A new strategy is one new row.
STRATEGIES = (
    OneDevice,
    Mirrored,
    Sharded,
    TensorParallel,
    MultiWorkerMirrored,
    Horovod,
    CentralStorage,
    ParameterServer,
    Pipeline,
    Hybrid,
    Tpu,
)

if TYPE_CHECKING:
    AnyStrategy = StrategySection
else:
    AnyStrategy = Annotated[Union[STRATEGIES], Field(discriminator="name")]  # noqa: UP007
