"""Which tape is asked for gradients, of what, as the variables among its sources see it.

`GradientTape.gradient` is called by users on tapes that they made. To change what it computes
without changing its class, a variable looks who asks for its handle: of all code, only `gradient`
does it as below, after it has listed its targets and before it takes their gradients.

    GradientTape.gradient -> _handle_or_self -> Variable.handle (Keras) -> Variable.handle (ours)
"""

import contextlib
import sys
from collections.abc import Callable
from types import FrameType

import tensorflow as tf
from tensorflow.python.eager import backprop, record

_GRADIENT = backprop.GradientTape.gradient.__code__
_HANDLE_OR_SELF = backprop._handle_or_self.__code__
TARGETS = "flat_targets"  # the local variable of `gradient`


def gradient_asked_for() -> tuple[tf.GradientTape, list] | None:
    """The tape that reads the handle of a source, and its targets: a list that may be changed.

    None if the property `handle` that calls this function's caller was read by anyone else.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "handle":
        frame = frame.f_back
    if frame is None or frame.f_code is not _HANDLE_OR_SELF:
        return None
    frame = frame.f_back
    if frame is None or frame.f_code is not _GRADIENT:
        return None
    return frame.f_locals["self"], frame.f_locals[TARGETS]


def is_as_asked_for(gradient: tf.Tensor) -> bool:
    """Whether `GradientTape.gradient` has made a tensor of a graph, and nobody has changed it."""
    lines = ((frame.filename, frame.name) for frame in gradient.op.traceback)
    return (_GRADIENT.co_filename, _GRADIENT.co_name) in lines


def with_gradient(
    tape: tf.GradientTape, tensor: tf.Tensor, gradient: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """`tensor`, whose gradient on `tape` goes through the function `gradient`.

    The tape may have stopped recording.
    """
    with record.stop_recording():
        same = tf.identity(tensor)
    recording: contextlib.AbstractContextManager = tape._ensure_recording()
    with recording:
        record.record_operation("WithGradient", [same], [tensor], lambda x: [gradient(x)])
    return same
