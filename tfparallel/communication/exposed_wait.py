"""For how long sums are waited for with nothing else left to compute of what they are made of.

What travels while later gradients are still computed costs nothing: it is hidden.

    gradients    a ......... b ......... c |
    sums            [  a  ]     [  b  ]    |[  c  ]
                                           |<----->|   exposed: from the last one to the last sum

Two looks at the clock in the step's graph, of which no result depends.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import ResourceVariable
from tfparallel.internals.eager import is_op_determinism_enabled


class ExposedWait:
    """Adds up what reductions on one device expose.

    Args:
        device: where it reduces. Only of a CPU it can be told: the host runs ahead of others.
    """

    def __init__(self, device: str):
        self._is_on_cpu = tf.DeviceSpec.from_string(device).device_type in (None, "CPU")
        with tf.init_scope(), tf.device("CPU:0"):
            # Not `tf.Variable`: under a strategy's scope it would be replicated.
            self._seconds = ResourceVariable(tf.constant(0.0, tf.float64), trainable=False)

    @property
    def seconds(self) -> float:
        """So far."""
        return float(self._seconds.numpy())

    def begin(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """When the last of what will be summed is there; None where that cannot be told."""
        if not self._is_on_cpu or is_op_determinism_enabled():  # which no clock is
            return None
        with tf.device("CPU:0"), tf.control_dependencies(list(tensors)):
            return tf.timestamp()

    def end(self, began: tf.Tensor | None, sums: Sequence[tf.Tensor]) -> None:
        """Adds how long it took from there until the last sum is there."""
        if began is None or not sums:
            return
        with tf.device("CPU:0"), tf.control_dependencies([began, *sums]):
            self._seconds.assign_add(tf.timestamp() - began)
