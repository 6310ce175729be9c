"""What a stage keeps of a microbatch between its forward and its backward pass.

A stage of a large model keeps a thousand tensors. Packed into one they are one edge of the step's
graph, which every pass of TensorFlow over that graph has to visit, and one argument of a call.
"""

from collections.abc import Sequence

import tensorflow as tf


class Stash:
    """How some tensors are packed: as an optional of tf.data, the one variant of mixed dtypes.

    Args:
        tensors: of a graph, what is to be kept.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]):
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._shapes = [tensor.shape for tensor in tensors]

    @property
    def packed_types(self) -> list[tf.DType]:
        """The types of what `pack` returns."""
        return [tf.variant] if self._dtypes else []

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """One variant tensor that holds `tensors`; none without tensors."""
        return [tf.raw_ops.OptionalFromValue(components=tensors)] if tensors else []

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors that `pack` has packed."""
        if not self._dtypes:
            return []
        (optional,) = packed
        return tf.raw_ops.OptionalGetValue(
            optional=optional, output_types=self._dtypes, output_shapes=self._shapes
        )
