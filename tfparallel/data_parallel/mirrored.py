"""Replicas on the devices of one process, each with all variables."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.replicas.local import LocalExtended


class MirroredLocalExtended(LocalExtended):
    """`MirroredExtended` that reduces before optimizers look, without collectives on CPU."""

    _places_batches = True

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        devices: Sequence[str] | None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
    ):
        self._user_cross_device_ops = cross_device_ops
        super().__init__(container_strategy, devices, cross_device_ops)
