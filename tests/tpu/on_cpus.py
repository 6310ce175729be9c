"""A TPU's Keras steps on logical CPUs: the same mixins over the stock strategy for CPUs."""

import tensorflow as tf

from tfparallel.internals import MirroredExtended
from tfparallel.tpu.spmd_extended import SpmdExtended
from tfparallel.tpu.spmd_step import SpmdKerasSteps


class CpuExtended(SpmdExtended, MirroredExtended):
    """What `KerasTPUExtended` is over `TPUExtended`."""


class CpuStrategy(SpmdKerasSteps, tf.distribute.MirroredStrategy):
    """What `TPUStrategy` is over the stock one: it adds the mixins, and connects."""

    def __init__(self, num_cores: int = 2):
        devices = [f"CPU:{i}" for i in range(num_cores)]
        # TensorFlow's collectives on CPUs keep their keys in the process: another test's may clash.
        super().__init__(devices, tf.distribute.ReductionToOneDevice())
        self._extended.__class__ = CpuExtended

    @classmethod
    def on_hosts(cls, num_hosts: int, num_cores: int) -> "CpuStrategy":
        """On so many cores of each of several hosts, tasks of the job that this process is in.

        One process drives them all, which the stock strategy does not offer for several hosts.
        """
        strategy = cls(num_cores)
        cores = [
            [f"/job:worker/replica:0/task:{host}/device:CPU:{core}" for core in range(num_cores)]
            for host in range(num_hosts)
        ]
        extended = strategy._extended
        extended._devices = tuple(core for own in cores for core in own)
        extended._input_workers_devices = tuple((own[0], tuple(own)) for own in cores)
        return strategy
