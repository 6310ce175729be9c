"""A chain of units whose gathers and computations call back, so that their order can be told.

Nothing is simulated but time: what is gathered is gathered, and what is computed is computed.
"""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.sharded.in_one_process import LocalShardedExtended

WIDTH = 64
Callback = Callable[[int, int], None]  # of a replica and a unit


def called(callback: Callback, replica: int, unit: int, value: tf.Tensor) -> tf.Tensor:
    """`value`, behind a call of `callback` when it is there; in no order with other calls."""

    def call(array: np.ndarray) -> np.ndarray:
        callback(replica, unit)
        return array

    same = tf.numpy_function(call, [value], value.dtype, stateful=False)
    same.set_shape(value.shape)
    return same


class Unit(keras.layers.Dense):
    """A layer that calls back in its forward and in its backward pass, each once for a replica."""

    def __init__(self, unit: int, computing: Callback):
        super().__init__(WIDTH, use_bias=False)
        self._unit, self._computing = unit, computing

    def call(self, x: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        replica = int(tf.get_static_value(replica)) if tf.is_tensor(replica) else replica

        @tf.custom_gradient
        def compute(y):
            def backward(dy):
                return called(self._computing, replica, self._unit, dy)

            return called(self._computing, replica, self._unit, y), backward

        return compute(super().call(x))


def chain(
    count: int, gathering: Callback, computing: Callback, monkeypatch, **options
) -> keras.Model:
    """`count` units on two devices.

    Args:
        gathering, computing: called where the gather, or the computation, of a unit begins.
    """
    strategy = tfparallel.ShardedStrategy(["CPU:0", "CPU:1"], min_size=1, **options)
    units: dict[int, int] = {}
    gather = LocalShardedExtended._wholes

    def watched(self, variables, parts, i, sent_as=None):
        unit = units.get(id(variables[0]))
        if unit is not None and not tf.executing_eagerly():
            first = [called(gathering, i, unit, parts[0][0]), *parts[0][1:]]
            parts = [first, *parts[1:]]
        return gather(self, variables, parts, i, sent_as)

    monkeypatch.setattr(LocalShardedExtended, "_wholes", watched)
    with strategy.scope():
        layers = [Unit(k, computing) for k in range(count)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile("sgd", "mse")
    units.update({id(layer.kernel.value): k for k, layer in enumerate(layers)})
    return model
