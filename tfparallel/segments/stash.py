"""What a stage keeps of a microbatch between its forward and its backward pass.

A stage of a large model keeps a thousand tensors. Packed into a few they are as many edges of the
step's graph, which every pass of TensorFlow over that graph has to visit, and as many operations
write and read them. What packs them is an optional of `tf.data`, the one value of TensorFlow that
holds tensors of any types and sizes, where they are.
Numbers that the host needs, as how often a loop has turned, are in shapes of what is packed.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals.numbers_in_shapes import from_shape, in_shape, is_of_host

_NOT_PACKED = (tf.variant, tf.resource)
_MOST_IN_ONE = 32


def optionals_for(num_tensors: int) -> list[slice]:
    """Which of so many each of several optionals holds.

    What reads one tensor takes the types of all: of 1,000 in one, reading takes 11 s to trace.
    """
    return [slice(i, i + _MOST_IN_ONE) for i in range(0, num_tensors, _MOST_IN_ONE)]


class Stash:
    """How some tensors are packed.

    Args:
        tensors: of a graph, what is to be kept.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]):
        self._of_host = {i: x.shape for i, x in enumerate(tensors) if is_of_host(x)}
        self._types = [(tensor.dtype, tensor.shape) for tensor in tensors]
        for i in self._of_host:
            self._types[i] = tf.int64, tf.TensorShape(None)
        apart = [dtype in _NOT_PACKED for dtype, _ in self._types]
        packed = [i for i, is_apart in enumerate(apart) if not is_apart]
        self._groups = [packed[own] for own in optionals_for(len(packed))]
        self._apart = [i for i, is_apart in enumerate(apart) if is_apart]

    @property
    def packed_types(self) -> list[tf.DType]:
        """The types of what `pack` returns."""
        return [tf.variant] * len(self._groups) + [self._types[i][0] for i in self._apart]

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Variant tensors that hold `tensors`, and those that none can hold."""
        own = [in_shape(x) if i in self._of_host else x for i, x in enumerate(tensors)]
        packed = [
            tf.raw_ops.OptionalFromValue(components=[own[i] for i in group])
            for group in self._groups
        ]
        return packed + [own[i] for i in self._apart]

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors that `pack` has packed."""
        tensors: dict[int, tf.Tensor] = {}
        for group, optional in zip(self._groups, packed, strict=False):
            types, shapes = zip(*(self._types[i] for i in group), strict=True)
            values = tf.raw_ops.OptionalGetValue(
                optional=optional, output_types=types, output_shapes=shapes
            )
            tensors |= zip(group, map(_apart_from_the_rest, values, shapes), strict=True)
        tensors |= zip(self._apart, packed[len(self._groups) :], strict=True)
        tensors |= {i: from_shape(tensors[i], shape) for i, shape in self._of_host.items()}
        return [tensors[i] for i in range(len(tensors))]


def _apart_from_the_rest(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """An image, given on by an operation of its own, which TensorFlow's optimiser leaves there.

    oneDNN computes the gradients of a convolution's kernel and of a bias as one if what both are of
    comes from one operation, whichever of its results each takes (`mkl_layout_pass.cc`, 2.21).
    """
    is_image = shape.rank is None or shape.rank > 3
    return tf.raw_ops.EnsureShape(input=tensor, shape=shape) if is_image else tensor
