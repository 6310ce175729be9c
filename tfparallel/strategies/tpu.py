"""Data parallel on the cores of a TPU: a thin layer over the stock strategy.

A TPU runs one XLA program of static shapes on all cores: batches that may differ in size get rows
of padding, which count nowhere.
"""

from typing import Any

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.internals import is_symbolic_build
from tfparallel.replicas import first_words
from tfparallel.segments.memory_policy import MemoryPolicy
from tfparallel.tpu.extended import KerasTPUExtended, connect_to_tpu
from tfparallel.tpu.spmd_step import SpmdKerasSteps


@checks_types
class TPUStrategy(SpmdKerasSteps, tf.distribute.TPUStrategy):
    """Synchronous data parallelism on TPUs.

    Drop-in for `tf.distribute.TPUStrategy`, that connects by itself. As under the other strategies,
    gradients are reduced before they are clipped, Dropout masks differ by replica and BatchNorm
    statistics are averaged. Batches of any size, and a smaller last one, are one program in `fit`,
    `evaluate` and `predict`: rows of padding fill them up, which count nowhere. On a TPU Pod each
    host reads the input for its own cores.

    Args:
        tpu_cluster_resolver: an initialised `tf.distribute.cluster_resolver.TPUClusterResolver`.
            None connects to `tpu` and initialises it.
        experimental_device_assignment, experimental_spmd_xla_partitioning: as the stock ones.
        tpu: without a resolver, the TPU's name or address; "local" is the TPU of this TPU VM. A Pod
            has a name: one process, on one of its hosts, drives all of them.
        batch_rows: how many rows a batch has at most, for data that does not tell: a generator, a
            `PyDataset`, or `*_on_batch` of growing sizes. All are filled up to it.
        memory: which activations are computed again in the backward pass. Nothing is offloaded.

    Raises:
        RuntimeError: if no TPU is found, saying what was looked for.
        ValueError: for `batch_rows` that are no number of rows, and a policy that offloads.
    """

    def __init__(
        self,
        tpu_cluster_resolver: tf.distribute.cluster_resolver.TPUClusterResolver | None = None,
        experimental_device_assignment: tf.tpu.experimental.DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        tpu: str = "local",
        batch_rows: int | None = None,
        memory: MemoryPolicy | None = None,
    ):
        if batch_rows is not None and batch_rows < 1:
            raise ValueError(f"batch_rows must be positive. Received: {batch_rows}.")
        if memory is not None and memory.offload != "none":
            raise ValueError(
                "A TPU's step is one program, which moves nothing to the host. Received: "
                f"offload={memory.offload!r}. Say rematerialize= of these layers instead."
            )
        resolver = tpu_cluster_resolver or connect_to_tpu(tpu)
        super().__init__(
            resolver, experimental_device_assignment, experimental_spmd_xla_partitioning
        )
        self._batch_rows, self._memory = batch_rows, memory or MemoryPolicy()
        self._extended.__class__ = KerasTPUExtended  # the stock constructor builds the stock one
        first_words.say_of(self)

    def reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: object, axis: int | None
    ) -> Any:
        """`tf.distribute.Strategy.reduce`, also over nests."""
        if is_symbolic_build():
            return tf.nest.map_structure(lambda v: self.experimental_local_results(v)[0], value)
        reduce = super().reduce
        return tf.nest.map_structure(lambda leaf: reduce(reduce_op, leaf, axis), value)
