"""A few numbers of the host as the shape of a tensor without elements, which is on a device.

A list, and what a function that is called on another device takes, is in a GPU's memory: int32 that
the host computes with go there and come back, and the host waits for the GPU. The shape of a tensor
is in the host's memory, wherever its elements are.

    [3, -1]  ->  no elements of shape [0, 3, 0, 0, 1]  ->  [3, 0] - [0, 1]
"""

import tensorflow as tf

_LARGEST_COUNT = 100  # a tensor has 254 dimensions at most
_ON_HOST = {  # whose int32 are in the host's memory on GPUs
    *("Placeholder", "While", "StatelessWhile"),  # a function's arguments; a loop's results
    *("Shape", "Size", "Rank", "TensorListLength", "TensorListElementShape"),
    *("AddV2", "Sub", "Mul", "Neg", "Maximum", "Minimum", "FloorDiv", "FloorMod"),
    *("Pack", "ConcatV2", "StridedSlice", "Reshape"),
}


def is_of_host(tensor: tf.Tensor) -> bool:
    """Whether, within a function, it is a few int32 that are on the host if GPUs compute."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    count = tensor.shape.num_elements()
    is_short = tensor.shape.rank in (0, 1) and count is not None and count <= _LARGEST_COUNT
    return is_short and tensor.dtype == tf.int32 and tensor.op.type in _ON_HOST


def in_shape(numbers: tf.Tensor) -> tf.Tensor:
    """No elements, of a type without gradients, with a shape that says what `numbers` are."""
    flat = tf.reshape(numbers, [-1])
    return tf.zeros(tf.concat([[0], tf.maximum(flat, 0), tf.maximum(-flat, 0)], 0), tf.int64)


def from_shape(carrier: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """The numbers, of this `shape`, that `in_shape` has put into one."""
    sizes, count = tf.shape(carrier), 1 + shape.num_elements()
    return tf.reshape(sizes[1:count] - sizes[count:], shape)
