"""Which tape is asked for gradients, of what, as the variables among its sources see it.

`GradientTape.gradient` is called by users on tapes that they made. To change what it computes
without changing its class, a variable looks who asks for its handle: of all code, only `gradient`
does it as below, after it has listed its targets and before it takes their gradients.

    GradientTape.gradient -> _handle_or_self -> Variable.handle (Keras) -> Variable.handle (ours)
"""

import contextlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.eager import backprop, forwardprop, record

# By name, what operations of a graph have for a gradient.
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops import gradients_util

from tfparallel.internals.graphs import called_graphs

_GRADIENT = backprop.GradientTape.gradient.__code__
_MAKING_GRADIENTS = {(_GRADIENT.co_filename, name) for name in (_GRADIENT.co_name, "jacobian")}
_HANDLE_OR_SELF = backprop._handle_or_self.__code__
_PACKAGES = tuple(
    f"{Path(each).parent}{os.sep}" for each in (tf.__file__, keras.__file__, Path(__file__).parent)
)
_OPERATIONS = "array_ops", "gen_array_ops", "weak_tensor_ops"
# What a call of `tf.stop_gradient` or Keras's own goes through.
_WAYS = tuple(
    os.path.join(package, *parts)
    for package, *parts in (
        *[(_PACKAGES[0], "python", "ops", f"{x}.py") for x in _OPERATIONS],
        *[(_PACKAGES[0], "python", x, "") for x in ("framework", "util")],
        *[(_PACKAGES[1], "src", x, "") for x in ("ops", "backend")],
    )
)
TARGETS = "flat_targets"  # the local variable of `gradient`


class AskedGradient(NamedTuple):
    """A call of `GradientTape.gradient`.

    Attributes:
        tape: that is asked.
        targets: of which, a list that may be changed.
        has_output_gradients: whether the caller says what the gradient begins with.
        jacobian_of: of which the target is any one number, if `jacobian` is the caller; else None.
    """

    tape: tf.GradientTape
    targets: list
    has_output_gradients: bool
    jacobian_of: tf.Tensor | None


def gradient_asked_for() -> AskedGradient | None:
    """What the tape that reads the handle of a source is asked.

    None if the property `handle` that calls this function's caller was read by anyone else.
    """
    frame = _reader_of_handle(sys._getframe(2))
    if frame is None or frame.f_code is not _HANDLE_OR_SELF:
        return None
    frame = frame.f_back
    if frame is None or frame.f_code is not _GRADIENT:
        return None
    asked, caller = frame.f_locals, frame.f_back
    is_of_jacobian = caller is not None and caller.f_globals is vars(backprop)
    of = caller.f_locals["target"] if is_of_jacobian else None  # type: ignore[union-attr]
    has_output_gradients = asked["output_gradients"] is not None
    return AskedGradient(asked["self"], asked[TARGETS], has_output_gradients, of)


def is_asked_without_tape() -> bool:
    """Whether `tf.gradients` has read the property `handle` that calls this function's caller."""
    frame = _reader_of_handle(sys._getframe(2))
    return frame is not None and frame.f_globals is vars(gradients_util)


def is_followed_forward() -> bool:
    """Whether `tf.autodiff.ForwardAccumulator` has read the property `handle`, to follow it."""
    frame = _reader_of_handle(sys._getframe(2))
    return frame is not None and frame.f_globals is vars(forwardprop)


def _reader_of_handle(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_name == "handle":
        frame = frame.f_back
    return frame


def is_of_gradient(operation: tf.Operation) -> bool:
    """Whether `GradientTape.gradient`, or `jacobian`, has made an operation of a graph."""
    if operation.name.startswith("gradient_tape/"):  # most are named so, and it is read sooner
        return True
    lines = ((frame.filename, frame.name) for frame in operation.traceback)
    return any(line in _MAKING_GRADIENTS for line in lines)


def has_own_gradients(graph: tf.Graph, is_stopped: bool = True) -> bool:
    """Whether a user says in `graph`, by `tf.custom_gradient`, how a gradient is computed.

    Args:
        graph: with all that it calls.
        is_stopped: counts `tf.stop_gradient`, too.
    """
    return any(
        _is_own_gradient(operation, is_stopped)
        or any(has_own_gradients(inner, is_stopped) for inner, _ in called_graphs(operation))
        for operation in graph.get_operations()
    )


def _is_own_gradient(operation: tf.Operation, is_stopped: bool) -> bool:
    if operation.type == "StopGradient" and is_stopped:
        files = (frame.filename for frame in reversed(operation.traceback))
        return not next(x for x in files if not x.startswith(_WAYS)).startswith(_PACKAGES)
    kind = operation.node_def.attr["_gradient_op_type"].s if operation.type == "IdentityN" else b""
    return kind.startswith(b"CustomGradient") and _is_of_user(kind.decode())


def _is_of_user(kind: str) -> bool:
    """Whether the backward pass that `tf.custom_gradient` has registered is a user's function."""
    known = inspect.getclosurevars(gradient_registry.lookup(kind)).nonlocals
    if "tape_grad_fn" not in known:
        return True  # of a SavedModel: nobody knows
    function = inspect.unwrap(inspect.getclosurevars(known["tape_grad_fn"]).nonlocals["grad_fn"])
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is None or not code.co_filename.startswith(_PACKAGES)


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
