"""What a stage keeps of a microbatch between its forward and its backward pass.

A stage of a large model keeps a thousand tensors. Packed into one list for each dtype they are a
handful of edges of the step's graph, which every pass of TensorFlow over that graph has to visit.
Numbers that the host needs, as how often a loop has turned, are in shapes of what is packed.
"""

import collections
import functools
from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals.numbers_in_shapes import from_shape, in_shape, is_of_host

_NOT_PACKED = (tf.variant, tf.resource)


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
        self._at: dict[tf.DType, list[int]] = collections.defaultdict(list)
        for i, (dtype, _) in enumerate(self._types):
            self._at[dtype].append(i)

    @property
    def packed_types(self) -> list[tf.DType]:
        """The types of what `pack` returns."""
        return [
            own
            for dtype, at in self._at.items()
            for own in ([dtype] * len(at) if dtype in _NOT_PACKED else [tf.variant])
        ]

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """A few variant tensors that hold `tensors`."""
        packed = []
        tensors = [in_shape(x) if i in self._of_host else x for i, x in enumerate(tensors)]
        for dtype, at in self._at.items():
            if dtype in _NOT_PACKED:
                packed += [tensors[i] for i in at]
                continue
            handle = tf.raw_ops.EmptyTensorList(
                element_shape=-1, max_num_elements=-1, element_dtype=dtype
            )
            for i in at:
                handle = tf.raw_ops.TensorListPushBack(input_handle=handle, tensor=tensors[i])
            packed.append(handle)
        return packed

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors that `pack` has packed."""
        tensors: list = [None] * len(self._types)
        rest, constant = iter(packed), functools.cache(tf.constant)
        for dtype, at in self._at.items():
            if dtype in _NOT_PACKED:
                for i in at:
                    tensors[i] = next(rest)
                continue
            handle = next(rest)
            for index, i in enumerate(at):
                shape = self._types[i][1]
                sizes = -1 if shape.rank is None else tuple(-1 if n is None else n for n in shape)
                tensors[i] = tf.raw_ops.TensorListGetItem(
                    input_handle=handle,
                    index=constant(index),
                    element_shape=constant(sizes, tf.int32),
                    element_dtype=dtype,
                )
                tensors[i].set_shape(shape)
        for i, shape in self._of_host.items():
            tensors[i] = from_shape(tensors[i], shape)
        return tensors
