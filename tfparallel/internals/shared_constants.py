"""Small constants of a graph under construction, made once for all that take them.

A quarter of the operations of a step are constants, and nine in ten of these the graph has already:
shapes and dims that gradients reshape and sum by, the momentum of each moving average. TensorFlow's
optimiser makes one of equal ones, when they have been traced. Here what asks for one gets that
which is there, if it is of the same device, and waits for the same:

    integers of at most one dim, which no tape watches        from anyone
    floating-point numbers                                    that operations make of Python numbers

Other floats stay apart: a user may watch two equal ones, each for a gradient of its own. So do
small tensors from outside: TensorFlow makes a constant of each, an input of the function.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType

import tensorflow as tf

# Who makes tensors of the numbers that an operation takes: operations, and Python's operators.
from tensorflow.python.framework import op_def_library, ops, override_binary_operator
from tensorflow.python.ops import math_ops

from tfparallel.internals.graphs import FuncGraph

_MAX_DIM = 16
_MAX_FRAMES = 14  # from a call of `_FOR_OPERATIONS` to the constant that it makes
_MAX_FRAMES_OF_INPUT = 4  # from one of `_FOR_INPUTS`
_FOR_OPERATIONS = [
    inspect.unwrap(function).__code__
    for function in (
        op_def_library._ExtractInputsAndAttrs,
        override_binary_operator.maybe_promote_tensors,
        math_ops._add_dispatch,
    )
]
# Who makes them of tensors from outside.
_FOR_INPUTS = [inspect.unwrap(ops.EagerTensor._capture_as_const).__code__]


@contextlib.contextmanager
def constants_shared(graph: tf.Graph) -> Iterator[None]:
    """Within it, `graph` has equal small constants once, whichever thread asks for them.

    A graph has no `__dict__`, so that this is no hook as `hooks.py` makes them. What is not the
    graph of a `tf.function` is left alone.
    """
    create = graph._create_op_internal
    is_shared = isinstance(create, functools.partial) and create.func is _create
    if is_shared or not isinstance(graph, FuncGraph):
        yield
        return
    graph._create_op_internal = functools.partial(_create, graph, create, {})
    try:
        yield
    finally:
        del graph._create_op_internal


def _create(
    graph: FuncGraph,
    create: Callable,
    known: dict[tuple, tf.Operation],
    kind: str,
    inputs: Sequence,
    *args: object,
    **options: object,
) -> tf.Operation:
    """`create(kind, inputs, *args, **options)`, or a constant that is among those `known`."""
    attributes = options.get("attrs")
    if kind != "Const" or not isinstance(attributes, Mapping):
        return create(kind, inputs, *args, **options)
    key = _key(graph, attributes)
    if key is None:
        return create(kind, inputs, *args, **options)
    if key not in known:
        known[key] = create(kind, inputs, *args, **options)
    return known[key]


def _key(graph: FuncGraph, attributes: Mapping) -> tuple | None:
    """Equal for constants that may be one; None for one that stays alone."""
    value = attributes["value"].tensor
    sizes = value.tensor_shape.dim
    if len(sizes) > 1 or any(each.size > _MAX_DIM for each in sizes):
        return None
    dtype = tf.as_dtype(value.dtype)
    is_for_anyone = dtype.is_integer or (
        dtype.is_floating and _is_within(_FOR_OPERATIONS, _MAX_FRAMES)
    )
    if not is_for_anyone or _is_within(_FOR_INPUTS, _MAX_FRAMES_OF_INPUT):
        return None
    device, behind = _device(graph), frozenset(graph._current_control_dependencies())
    return None if device is None else (value.SerializeToString(), device, behind)


def _device(graph: FuncGraph) -> str | None:
    """The device that an operation would get; None if it would get more than that."""
    is_plain = not (graph._attr_scope_map or graph._colocation_stack)
    if not is_plain or graph._get_control_flow_context():
        return None
    placed = _Placed()
    for each in graph._device_function_stack.peek_objs():
        if each.function is None:
            break
        if not each.fast_string_merge:  # a function of the operation
            return None
        placed.device = each.function.shortcut_string_merge(placed)
    return placed.device


class _Placed:
    """Has a device, as an operation has."""

    device = ""


def _is_within(codes: Sequence[CodeType], most_frames: int) -> bool:
    """Whether any of these is on the way to the call that makes a constant."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(most_frames):
        if frame is None or frame.f_code in codes:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code in codes
