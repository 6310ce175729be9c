"""What a stage keeps of a microbatch between its forward and its backward pass.

A stage of a large model keeps a thousand tensors. Packed into one list for each dtype they are a
handful of edges of the step's graph, which every pass of TensorFlow over that graph has to visit.
"""

import collections
from collections.abc import Sequence

import tensorflow as tf

_NOT_PACKED = (tf.variant, tf.resource)


class Stash:
    """How some tensors are packed.

    Where a stage computes on several devices, each of those keeps its own: a list for each dtype
    and device. Where it has one, that of an operation is not written into what may be called
    elsewhere.

    Args:
        tensors: of a graph, what is to be kept.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]):
        self._types = [(tensor.dtype, tensor.shape) for tensor in tensors]
        is_on_several = len({tensor.device for tensor in tensors} - {""}) > 1
        self._at: dict[tuple, list[int]] = collections.defaultdict(list)
        for i, tensor in enumerate(tensors):
            self._at[tensor.dtype, tensor.device if is_on_several else ""].append(i)

    @property
    def packed_types(self) -> list[tf.DType]:
        """The types of what `pack` returns."""
        return [
            own
            for (dtype, _), at in self._at.items()
            for own in ([dtype] * len(at) if dtype in _NOT_PACKED else [tf.variant])
        ]

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """A few variant tensors that hold `tensors`."""
        packed = []
        for (dtype, device), at in self._at.items():
            if dtype in _NOT_PACKED:
                packed += [tensors[i] for i in at]
                continue
            with tf.device(device or None):
                packed.append(_packed([tensors[i] for i in at], dtype))
        return packed

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors that `pack` has packed."""
        tensors: list = [None] * len(self._types)
        rest = iter(packed)
        for (dtype, device), at in self._at.items():
            if dtype in _NOT_PACKED:
                for i in at:
                    tensors[i] = next(rest)
                continue
            handle = next(rest)
            with tf.device(device or None):
                for index, i in enumerate(at):
                    tensors[i] = _unpacked(handle, index, *self._types[i])
        return tensors


def _packed(tensors: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    handle = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=dtype)
    for tensor in tensors:
        handle = tf.raw_ops.TensorListPushBack(input_handle=handle, tensor=tensor)
    return handle


def _unpacked(handle: tf.Tensor, index: int, dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    sizes = -1 if shape.rank is None else [-1 if n is None else n for n in shape]
    tensor = tf.raw_ops.TensorListGetItem(
        input_handle=handle,
        index=index,
        element_shape=tf.constant(sizes, tf.int32),
        element_dtype=dtype,
    )
    tensor.set_shape(shape)
    return tensor
