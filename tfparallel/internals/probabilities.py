"""What Keras's cross entropies compute from instead of the probabilities that they are given.

Keras's `softmax` and `sigmoid` leave their input at what they return, as an attribute. A loss that
finds it computes from it; of probabilities below 1e-7 it would know nothing, and give no gradient.
Where there is none, it asks whether a `Softmax` or `Sigmoid` operation has made the tensor
(`_get_logits` of keras/src/backend/tensorflow/nn.py). A copy of the tensor has neither.
"""

from typing import NamedTuple

import tensorflow as tf

_ATTRIBUTE = "_keras_logits"
_OPERATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}


class Origin(NamedTuple):
    """What probabilities were made of.

    Attributes:
        logits: of the same graph.
        operation: that made them, where a loss looks at it; None where it finds an attribute.
    """

    logits: tf.Tensor
    operation: str | None


def origin_of(tensor: object) -> Origin | None:
    """What losses would compute from; None where that is `tensor` itself."""
    noted = noted_origin_of(tensor)
    if noted is not None or not isinstance(tensor, tf.Tensor):
        return noted
    if tf.is_symbolic_tensor(tensor) and tensor.op.type in _OPERATIONS:
        return Origin(tensor.op.inputs[0], tensor.op.type)
    return None


def noted_origin_of(tensor: object) -> Origin | None:
    """As `origin_of`, where Keras's functions have made it."""
    logits = getattr(tensor, _ATTRIBUTE, None)
    if logits is None or not isinstance(tensor, tf.Tensor):
        return None
    is_elsewhere = tf.is_symbolic_tensor(tensor) and logits.graph is not tensor.graph
    return None if is_elsewhere else Origin(logits, None)


def with_origin(copy: tf.Tensor, origin: Origin | None, logits: tf.Tensor | None) -> tf.Tensor:
    """A copy of a tensor of that `origin`, of which losses compute from `logits`.

    Args:
        copy: of the tensor.
        origin: of the tensor, not of the copy.
        logits: a copy of `origin.logits`, of the copy's graph. None without an origin.
    """
    if origin is None or logits is None:
        return copy
    if origin.operation is None:
        setattr(copy, _ATTRIBUTE, logits)
        return copy
    with tf.device(logits.device):
        return _OPERATIONS[origin.operation](logits)
