"""The eager context of TensorFlow, and what its gradient tapes would do next."""

import contextlib
import gc
import random
from collections.abc import Iterator, Sequence

import tensorflow as tf

# What a gradient tape would do next, to record calls of a pipeline's stages on it.
from tensorflow.python import pywrap_tfe

# Peer health checks, the key-value store of a cluster and aborting collectives live in the context.
from tensorflow.python.eager import context, forwardprop_util, record

# Keeps the errors of one thread's remote calls to itself.
from tensorflow.python.eager.executor import new_executor

# How often each traced function is in use; the last one out removes it from every server.
from tensorflow.python.eager.polymorphic_function import atomic_function

# Whether operations shall be deterministic, which a clock's are not: TensorFlow then refuses them.
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.ops import gradients_util

# A variable that no strategy's scope replicates, to order operations by, and one that has no value
# yet; and how a variable that a function reads is told to the gradient tapes around its call.
from tensorflow.python.ops.resource_variable_ops import (
    ResourceVariable,
    UninitializedVariable,
    variable_accessed,
)

__all__ = [
    "ResourceVariable",
    "UninitializedVariable",
    "context",
    "end_collectives",
    "has_one_tape",
    "has_started",
    "has_tangents",
    "is_op_determinism_enabled",
    "keep_traced_functions",
    "let_idle_threads_sleep",
    "new_executor",
    "operation_seeds",
    "own_eager_seeds",
    "record",
    "set_operation_seeds",
    "variable_accessed",
    "variables_alive",
]


def has_started() -> bool:
    """Whether TensorFlow has opened its devices in this process, as its first operation does."""
    return context.context()._context_handle is not None


def end_collectives(message: str) -> None:
    """Makes all collectives that wait in this process fail, and all later ones."""
    context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def keep_traced_functions() -> None:
    """Has TensorFlow keep the functions of this process until it ends, whoever else lets them go.

    Servers that are connected to later do not know them: each removal would be an error there.
    """
    references = atomic_function.RUNTIME_FUNCTION_REFS
    for key in references:
        references[key] += 1


def variables_alive() -> list[str]:
    """The names of the variables with values in this process."""
    return [
        found.name
        for found in gc.get_objects()
        if issubclass(type(found), ResourceVariable) and not tf.is_symbolic_tensor(found.handle)
    ]


def operation_seeds() -> random.Random | None:
    """What eager random operations without a seed draw theirs from; None before the first."""
    return getattr(context.context(), "_rng", None)


def set_operation_seeds(seeds: random.Random | None) -> None:
    """Has them draw from `seeds`."""
    context.context()._rng = seeds


@contextlib.contextmanager
def own_eager_seeds() -> Iterator[None]:
    """Within it, eager random operations draw other seeds than they would, and use up none.

    Seeds put back would be drawn again, and find TensorFlow's kernels for them somewhere on.
    """
    eager = context.context()
    seeds = getattr(eager, "_rng", None)
    eager._rng = random.Random()
    try:
        yield
    finally:
        eager._rng = seeds


def has_one_tape(tensors: Sequence) -> bool:
    """Whether gradients of `tensors` are of the first order: one tape, which is not persistent."""
    first = gradients_util.POSSIBLE_GRADIENT_TYPES_FIRST_ORDER
    return pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(tensors) == first


def has_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows any of `tensors`."""
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def let_idle_threads_sleep() -> None:
    """Has TensorFlow's threads sleep as soon as they find no work, where none has started yet.

    Here, and in servers that this process connects to later. TensorFlow offers this to sessions
    only.
    """
    config = context.context()._config or tf.compat.v1.ConfigProto()
    config.experimental.disable_thread_spinning = True
    context.context()._config = config
