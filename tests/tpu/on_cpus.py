"""A TPU's Keras steps on logical CPUs: the same mixins over the stock strategy for CPUs."""

import tensorflow as tf

from tfparallel.internals import MirroredExtended, PerReplica
from tfparallel.tpu.spmd_step import SpmdExtended, SpmdKerasSteps


class CpuExtended(SpmdExtended, MirroredExtended):
    """What `KerasTPUExtended` is over `TPUExtended`."""


class CpuStrategy(SpmdKerasSteps, tf.distribute.MirroredStrategy):
    """What `TPUStrategy` is over the stock one: it adds the mixins, and connects."""

    def __init__(self, num_cores: int = 2):
        devices = [f"CPU:{i}" for i in range(num_cores)]
        # TensorFlow's collectives on CPUs keep their keys in the process: another test's may clash.
        super().__init__(devices, tf.distribute.ReductionToOneDevice())
        self._extended.__class__ = CpuExtended

    def reduce(self, reduce_op, value, axis):
        """Keras's symbolic build asks for the mean of a whole batch."""
        local = self.experimental_local_results
        if any(isinstance(leaf, PerReplica) for leaf in tf.nest.flatten(value)):
            return tf.nest.map_structure(lambda v: local(v)[0], value)
        return super().reduce(reduce_op, value, axis)
