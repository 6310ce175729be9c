"""Masks that a layer takes away from its inputs, so that whoever takes those later sees none.

Keras's MultiHeadAttention does: it has applied them. On one device "later" is later in the order
in which Keras calls the layers of a model; stages may run parts of it in another order.
"""

import contextlib
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf

from tfparallel.internals import get_keras_mask, set_keras_mask


def takes_masks(operation: object) -> bool:
    """Whether a call of it takes the masks of all its inputs away."""
    attention = keras.layers.MultiHeadAttention
    return isinstance(operation, attention) and type(operation).call is attention.call


@contextlib.contextmanager
def without_masks(tensors: Iterable[tf.Tensor]) -> Iterator[None]:
    """Within it, these have none."""
    masked = [(x, mask) for x in tensors if (mask := get_keras_mask(x)) is not None]
    for tensor, _ in masked:
        set_keras_mask(tensor, None)
    try:
        yield
    finally:
        for tensor, mask in masked:
            set_keras_mask(tensor, mask)
