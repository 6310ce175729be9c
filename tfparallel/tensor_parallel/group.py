"""The devices that compute one replica, as the rule of a layer sees them."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals.keras_state import autocast
from tfparallel.tensor_parallel.known_parts import joined, known_parts, on_device, parts_of
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import split_of


class Group:
    """What a rule computes with.

    Args:
        devices: one for each part.
    """

    def __init__(self, devices: Sequence[str]):
        self.devices = tuple(devices)

    def rows(self, variable: Any) -> Rows | None:
        """How a Keras variable is in parts, one for each device; None for any other, and no one's.

        A variable that is in one part is stored in pieces of that, and computed with as a whole.
        """
        split = split_of(variable)
        if split is None or len(split.rows.sizes) != len(self.devices):
            return None
        return split.rows

    def read(self, variable: Any) -> list[tf.Tensor]:
        """The parts of a split Keras variable, each on its device, in the layer's dtype."""
        split = split_of(variable)
        if split is None:
            raise ValueError(f"Expected a variable in parts. Received: {variable.path}.")
        values = []
        for device, value in zip(self.devices, split.part_values(), strict=True):
            with tf.device(device):
                values.append(autocast(variable, value))
        return values

    def read_or_slice(self, variable: Any, rows: Rows) -> list[tf.Tensor]:
        """The parts of a Keras variable along `rows`: its own, or slices of the whole."""
        if self.rows(variable) == rows:
            return self.read(variable)
        return parts_of(tf.convert_to_tensor(variable), rows)

    def known_rows(self, tensor: Any) -> Rows | None:
        """How `tensor` is in parts already; None for one that is not."""
        known = known_parts(tensor)
        return None if known is None or len(known[1]) != len(self.devices) else known[0]

    def parts(self, tensor: Any, rows: Rows) -> list[tf.Tensor]:
        """The parts of `tensor` along `rows`: those that it is in already, or slices."""
        return parts_of(tensor, rows)

    def compute(self, function: Callable, *inputs: Sequence[Any] | tf.Tensor) -> list[tf.Tensor]:
        """`function` of each part on its device, forward and backward.

        Args:
            function: of one tensor for each of `inputs`; returns a tensor.
            inputs: for each a list with a tensor for every device, or one tensor for all of them.
        """
        count = len(self.devices)
        lists = [list(x) if isinstance(x, (list, tuple)) else [x] * count for x in inputs]
        return [
            on_device(device, function, *each)
            for device, *each in zip(self.devices, *lists, strict=True)
        ]

    def joined(self, parts: Sequence[tf.Tensor], dim: int) -> tf.Tensor:
        """The whole of which these are the parts; not computed unless something reads it."""
        return joined(parts, dim)

    def summed(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Their sum, on the replica's own device."""
        with tf.device(self.devices[0]):
            return tf.add_n(list(parts))
